"""The compiled kernels against the formulas in float64. Attention of a whole step is in tests/executor."""

from __future__ import annotations

import math
import random
import runpy
import shutil
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from srt.kernels import cpu


def test_compiled_where_it_can_be():
    """So that nobody loses the kernels without noticing."""
    can = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and shutil.which("gcc")
    if not can:
        pytest.skip("no AVX2 or no C compiler here")
    assert cpu.AVAILABLE, "install the package: pip install '.[test]'"


@pytest.mark.parametrize(
    ("installed", "used"),
    [({}, False), ({"INTERFACE": cpu.INTERFACE + 1}, False), ({"INTERFACE": cpu.INTERFACE}, True)],
)
def test_kernels_of_another_version_are_not_used(installed, used, monkeypatch):
    module = types.ModuleType("lockstep_cpu")
    vars(module).update(installed)
    monkeypatch.setitem(sys.modules, "lockstep_cpu", module)
    assert runpy.run_path(cpu.__file__)["compiled"] is (module if used else None)


needs_kernels = pytest.mark.skipif(not cpu.AVAILABLE, reason="the kernels are not compiled here")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_kernels
@pytest.mark.parametrize("dtype", cpu.FORMATS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (7, 16), (64, 33), (577, 128), (96, 1000)])
def test_linear(num_inputs, num_outputs, dtype):
    weight = randn(num_outputs, num_inputs).to(dtype)
    bias = randn(num_outputs)
    with_bias, without = cpu.PanelLinear(weight, bias), cpu.PanelLinear(weight, None)
    for num_tokens in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 50):
        x = randn(num_tokens, num_inputs)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(without(x).double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(with_bias(x).double(), expected + bias.double(), rtol=1e-5, atol=1e-4)


@needs_kernels
def test_linear_of_every_other_column():
    weight = randn(32, 8).bfloat16()
    x = randn(3, 16)[:, ::2]
    torch.testing.assert_close(cpu.PanelLinear(weight, None)(x), x @ weight.float().T)


@needs_kernels
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (3, 576), (40, 576)])
def test_rms_norm(tokens, size):
    x, weight, eps = randn(tokens, size) * 3, randn(size), 1e-5
    x[0] = 0
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(cpu.rms_norm(x, weight, eps).double(), expected, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_rms_norm_of_some_heads():
    qkv, weight = randn(5, 7, 32), randn(32)
    part = qkv[:, 2:6]
    expected = torch.nn.functional.rms_norm(part.double(), (32,), weight.double(), 1e-6)
    torch.testing.assert_close(cpu.rms_norm(part, weight, 1e-6).double(), expected, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 9, 100])
def test_rotate(tokens):
    x, untouched = randn(tokens, 5, 32), 2
    angles = randn(tokens, 1, 16)
    turns = torch.polar(torch.full_like(angles, 1.25), angles)
    expected = x.clone()
    pairs = torch.view_as_complex(expected[:, :-untouched].reshape(tokens, -1, 16, 2)) * turns
    expected[:, :-untouched] = torch.view_as_real(pairs).flatten(-2)
    cpu.rotate_(x[:, :-untouched], turns)
    torch.testing.assert_close(x, expected)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_store(dtype):
    qkv, slots = randn(4, 6, 16), torch.tensor([3, 1, 8, 5])
    cache = torch.full((9, 4, 16), 7.0, dtype=dtype)
    cpu.store(cache, slots, qkv[:, 2:])
    assert torch.equal(cache[slots], qkv[:, 2:].to(dtype))
    assert (cache[[0, 2, 4, 6, 7]] == 7).all()


@needs_kernels
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (3, 1536), (20, 1536)])
def test_silu_and_mul(tokens, size):
    x = randn(tokens, 2 * size) * 20
    x[0, :4] = torch.tensor([-1e30, -100.0, 100.0, 1e30])
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(cpu.silu_and_mul(x).double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("size", [1, 31, 32, 100, 1003])
def test_what_no_bit_allows_is_forbidden(size):
    generator = torch.Generator().manual_seed(size)
    x = randn(7, size + 5)
    allowed = torch.randint(0, 2, (4, -(-size // 32) * 32), dtype=torch.bool, generator=generator)
    allowed[0], allowed[1] = True, False
    bits = (allowed.view(4, -1, 32) << torch.arange(32)).sum(-1).int()
    places = torch.tensor([6, 2, 3, 0])
    expected = x.clone()
    expected[places, :size] = x[places, :size].masked_fill(~allowed[:, :size], -math.inf)
    cpu.forbid_(x[:, :size], places, bits)
    assert torch.equal(x, expected)


@needs_kernels
def test_argmax_takes_the_first_of_the_largest():
    x = randn(5, 1003)
    x[1] = 2.0
    x[2, [77, 900]] = 50.0
    x[3] = -math.inf
    x[4, 1002] = math.inf
    assert cpu.argmax(x[:, :1003]).tolist() == [int(x[0].argmax()), 0, 77, 0, 1002]
    assert cpu.argmax(x[:, 3:1000]).tolist()[:3] == [int(x[0, 3:1000].argmax()), 0, 74]
    x[0, 5] = x[1] = math.nan
    assert cpu.argmax(x[:, 6:])[0] == x[0, 6:].argmax()
    assert cpu.argmax(x)[1] == 0


@needs_kernels
@pytest.mark.parametrize("seed", range(20))
def test_prefill_of_random_shapes(seed):
    rng = random.Random(seed)
    kv_heads, shared, size = rng.choice([1, 2, 3]), rng.choice([1, 3, 4, 7, 30]), 16 * rng.choice([1, 4, 5, 8])
    dtype = rng.choice([torch.float16, torch.float32])
    counts = [rng.choice([1, 2, 9, rng.randint(3, 60)]) for _ in range(rng.randint(1, 4))]
    lengths = [count + rng.choice([0, 1, 128, rng.randint(2, 300)]) for count in counts]
    cache = torch.full((sum(lengths) + 1, 2 * kv_heads, size), math.nan, dtype=dtype)
    slots = torch.full((len(lengths) + 2, max(lengths) + 3), len(cache), dtype=torch.int32)
    free = torch.randperm(len(cache), generator=torch.Generator().manual_seed(seed)).int()
    rows = rng.sample(range(len(slots)), len(lengths))
    for row, length in zip(rows, lengths, strict=True):
        slots[row, :length], free = free[:length], free[length:]
    cache[slots[slots < len(cache)].long()] = randn(sum(lengths), 2 * kv_heads, size).to(dtype)
    q = randn(sum(counts), (shared + 2) * kv_heads, size)[:, : shared * kv_heads] * rng.choice([1, 20])

    ours = cpu.prefill(q, cache, slots, *map(torch.tensor, (rows, lengths, counts)))

    for of_row, row, length in zip(ours.split(counts), rows, lengths, strict=True):
        queries, q = q[: len(of_row)].double().transpose(0, 1), q[len(of_row) :]
        keys, values = cache[slots[row, :length].long()].double().transpose(0, 1).chunk(2)
        scores = queries @ keys.repeat_interleave(shared, 0).transpose(1, 2) / math.sqrt(size)
        seen = torch.ones(len(of_row), length).tril(length - len(of_row)).bool()
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ values.repeat_interleave(shared, 0)
        torch.testing.assert_close(of_row.double(), expected.transpose(0, 1), rtol=2e-5, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("start", [0, 200])
def test_prefill_does_not_depend_on_where_a_prompt_is_cut(start):
    cache, q = randn(300, 2, 32), randn(100, 3, 32)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(0)).int()[None]

    def of(first, last):
        rows, lengths, counts = map(torch.tensor, ([0], [start + last], [last - first]))
        return cpu.prefill(q[first:last], cache, slots, rows, lengths, counts)

    torch.testing.assert_close(torch.cat([of(0, 7), of(7, 60), of(60, 100)]), of(0, 100), rtol=1e-5, atol=1e-6)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernels
def test_how_many_threads_share_the_work_changes_nothing(threads):
    linears = [cpu.PanelLinear(randn(size, 32).bfloat16(), None) for size in (5, 50, 500, 1600)]
    x, cache = randn(9, 32), randn(400, 2, 32)
    slots = torch.arange(400, dtype=torch.int32)[None]
    of_row = [torch.tensor([value]) for value in (0, 400, 9)]

    def all_of_them():
        return [linear(x) for linear in linears] + [cpu.prefill(x[:, None], cache, slots, *of_row)]

    threads(1)
    alone = all_of_them()
    for count in (2, 7, 3) * 20:
        threads(count)
        assert all(map(torch.equal, all_of_them(), alone))
    with ThreadPoolExecutor(4) as callers:
        for several in callers.map(lambda _: all_of_them(), range(40)):
            assert all(map(torch.equal, several, alone))
