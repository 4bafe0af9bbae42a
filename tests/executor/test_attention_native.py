"""The native backend against attention written out in float64, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from srt.executor.attention.torch_native import WASTE, TorchNativeBackend, groups_of_similar_length
from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.executor.tables import RowTables
from srt.kernels import cpu
from srt.scheduler.schedule_batch import ScheduleBatch

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 6, 2, 16


def run(
    rows: list[tuple[int, int]],
    num_decode: int,
    num_drafted: int = 0,
    *,
    shared: int = 0,
    dtype: torch.dtype = torch.float32,
    last: float | None = None,
):
    """`rows` are (start, length); all share the slots of the first `shared` positions. Ours, and what it should be.

    `last`: what the last token's keys and values are.
    """
    generator = torch.Generator().manual_seed(sum(start for start, _ in rows))
    context = max(start + length for start, length in rows)
    pool = context * len(rows) + 1
    cache = KVCache(
        num_layers=1, pool_tokens=pool, page_size=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=CPU
    )
    # Whatever no row may see is no number, so that seeing it shows, even times 0.
    cache.layer(0)[1:] = math.nan
    slots = (torch.randperm(pool, generator=generator) + 1)[: context * len(rows)].view(len(rows), context)
    slots[:, :shared] = slots[0, :shared]
    tables = RowTables(len(rows), context, CPU)
    tables.slots_RP.copy_(slots)
    tables.slots_RP.masked_fill_(torch.arange(context) >= torch.tensor([[s + n] for s, n in rows]), pool)
    for row, (start, _) in enumerate(rows):
        known = torch.randn((start, 2 * KV_HEADS, DIM), generator=generator) * 0.7
        begin = shared if row else 0
        cache.layer(0)[slots[row, begin:start]] = known[begin:].to(dtype)

    start, length = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    index = np.arange(len(rows), dtype=np.int32)
    none = np.zeros(0, np.int32)
    columns = (index, start, length, start + length, 0 * index, start + length, none)
    plan = ScheduleBatch(0, (), num_decode, *columns, num_drafted=num_drafted)
    num_tokens = int(length.sum())
    q_NHC = torch.randn((num_tokens, HEADS, DIM), generator=generator)
    kv_NSC = torch.randn((num_tokens, 2 * KV_HEADS, DIM), generator=generator)
    if last is not None:
        kv_NSC[-1] = last
    batch = ForwardBatch.build(plan, tables)
    ours = TorchNativeBackend(cache).plan(batch)(0, q_NHC, kv_NSC)

    expected, first = torch.zeros_like(ours, dtype=torch.float64), 0
    for row, (start_, length_) in enumerate(rows):
        kv = cache.layer(0)[slots[row, : start_ + length_]].double()
        for token in range(length_):
            for head in range(HEADS):
                k, v = (kv[: start_ + token + 1, kind + head // (HEADS // KV_HEADS)] for kind in (0, KV_HEADS))
                weights = (k @ q_NHC[first + token, head].double() / math.sqrt(DIM)).softmax(0)
                expected[first + token, head] = weights @ v
        first += length_
    return ours.double(), expected


@pytest.mark.parametrize(
    ("rows", "num_decode", "num_drafted", "shared"),
    [
        ([(0, 1)], 1, 0, 0),
        ([(9, 1)], 1, 0, 0),
        ([(9, 1), (9, 1), (9, 1)], 3, 0, 0),
        ([(40, 1), (3, 1), (0, 1), (77, 1)], 4, 0, 0),
        ([(1300, 1), (5, 1), (1250, 1), (9, 1), (30, 1)], 5, 0, 0),
        ([(100, 1), (90, 1), (80, 1)], 3, 0, 70),
        ([(100, 1), (100, 1), (100, 1)], 3, 0, 100),
        ([(100, 1), (90, 1)], 2, 0, 20),
        ([(0, 13)], 0, 0, 0),
        ([(6, 13)], 0, 0, 0),
        ([(0, 5), (0, 1), (70, 4)], 0, 0, 0),
        ([(33, 1), (8, 1), (0, 11), (12, 7)], 2, 0, 0),
        ([(1400, 1), (8, 1), (90, 1), (0, 11), (12, 1)], 3, 0, 0),
        ([(33, 1), (8, 5), (0, 3)], 1, 2, 0),
        ([(90, 4), (90, 2), (7, 9)], 0, 2, 30),
        ([(130, 45), (0, 20), (250, 9)], 0, 0, 90),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_as_written_out(rows, num_decode, num_drafted, shared, compiled, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    ours, expected = run(rows, num_decode, num_drafted, shared=shared)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_half_precision_cache(compiled, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    ours, expected = run([(40, 1), (300, 1), (6, 9)], 2, dtype=torch.float16)
    torch.testing.assert_close(ours, expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_float16_is_too_narrow_for_becomes_its_largest_number(compiled, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    cache = KVCache(
        num_layers=1, pool_tokens=4, page_size=1, num_kv_heads=1, head_dim=DIM, dtype=torch.float16, device=CPU
    )
    kv_NSC = torch.tensor([3.0, 7e4, -math.inf])[:, None, None].expand(3, 2, DIM).contiguous()
    cache.store(0, torch.tensor([1, 3, 2]), kv_NSC)
    assert cache.layer(0)[:, 0, 0].tolist() == [0, 3, -65504, 65504, 0]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("start", [0, 6])
def test_what_is_no_number_does_not_reach_the_tokens_before_it(start, last, dtype, compiled, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    before, _ = run([(start, 40)], 0, dtype=dtype)
    ours, _ = run([(start, 40)], 0, dtype=dtype, last=last)
    assert torch.equal(ours[:-1], before[:-1])


def test_groups_waste_little_and_hold_every_row_once():
    rng = np.random.default_rng(0)
    for lengths in ([5], [7, 7, 7], rng.integers(1, 8000, 200), [8000, *[100] * 50], rng.integers(100, 130, 60)):
        lengths = np.array(lengths)
        groups = groups_of_similar_length(lengths)
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
        for group in groups:
            assert (lengths[group].max() - lengths[group]).sum() <= WASTE
    assert len(groups_of_similar_length(np.array([8000, *[100] * 9]))) == 2
    assert groups_of_similar_length(np.zeros(0, int)) == []
