"""The executor of a GPU against transformers on the same weights.

In bfloat16 two correct programs choose differently where two tokens are nearly as likely. So each chosen token is
judged by the logits that transformers, in float32, has after the same tokens: it must be the best or nearly so.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import triton
from step_driver import StepDriver, Tenant
from test_sampler import reference_noise
from tiny_models import VOCAB, hf_model, our_config

from srt.executor.shape import ExecutorShape
from srt.messages import SamplingParams
from srt.models.loader import load_model
from srt.scheduler.schedule_batch import TokenMasks

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=1000, temperature=0.0)
SIZES = {"hidden_size": 384, "intermediate_size": 512, "head_dim": 64}
SIZES |= {"initializer_range": 0.06, "max_position_embeddings": 1024}
NEAR_TIE = 0.3
"""In standard deviations of the logits; transformers in bfloat16 strays up to 0.2 from itself in float32 here."""
FP8_NEAR_TIE = 0.6
"""K/V with 3 bits of mantissa stray up to 0.3."""


def model_of(family: str, dtype=torch.bfloat16, **extra):
    """Its float32 weights are numbers that `dtype` has."""
    return hf_model(family, **(SIZES | extra)).to(dtype).float().cuda()


def build(
    model,
    *,
    page_size=1,
    pool_tokens=4096,
    num_rows=8,
    context_length=512,
    graphs=True,
    dtype=torch.bfloat16,
    kv_dtype=None,
) -> StepDriver:
    from srt.executor.cuda_runner import CudaRunner

    config, device = our_config(model), torch.device("cuda", 0)
    runner = CudaRunner(
        load_model(config, model.state_dict().items(), dtype, device, context_length=context_length),
        config,
        ExecutorShape(
            num_rows=num_rows,
            context_length=context_length,
            pool_tokens=pool_tokens,
            page_size=page_size,
            num_tokens_vocab=VOCAB,
            kv_dtype=kv_dtype or dtype,
            dtype=dtype,
            device=device,
        ),
        most_tokens=256,
        graphs=graphs,
    )
    runner.warm_up()
    return StepDriver(runner, pool_tokens=pool_tokens, page_size=page_size)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def assert_chosen(model, tenant: Tenant, near_tie: float = NEAR_TIE, allowed: torch.Tensor | None = None) -> None:
    """Greedy, or drawn by the documented noise; among what is `allowed`, bool [tokens, vocabulary]."""
    wanted, vocabulary = tenant.sampling, range(VOCAB)
    with torch.inference_mode():
        logits = model(torch.tensor([tenant.tokens], device="cuda")).logits[0, tenant.prompt_len - 1 : -1].cpu()
    scores = logits.clone()
    if wanted.temperature > 0:
        places = range(tenant.prompt_len, len(tenant.tokens))
        noise = [[reference_noise(wanted.seed, place, token) for token in vocabulary] for place in places]
        scores += wanted.temperature * torch.tensor(noise)
    if allowed is not None:
        scores[~allowed] = -torch.inf
    chosen = scores.gather(1, torch.tensor(tenant.output)[:, None])[:, 0]
    lost = (scores.amax(-1) - chosen) / logits.std(-1)
    assert len(tenant.output) > 0
    assert lost.max() < near_tie, lost.tolist()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rows_join_leave_and_share(family, page_size, graphs):
    """Chunks of 7 mixed with decode rows, scrambled slots, a cache hit, a row whose table row had an earlier tenant."""
    model = model_of(family, **({"head_dim": 128} if family == "qwen3" else {}))
    driver = build(model, page_size=page_size, graphs=graphs)
    first = driver.tenant(3, prompt_of(23, seed=3), GREEDY)
    second = driver.tenant(0, prompt_of(241, seed=4), GREEDY)
    for _ in range(2):
        driver.step([first], chunk=7)
    for _ in range(5):
        driver.step([first, second], chunk=7)
    driver.generate([first, second], 6, chunk=7)
    sharing = driver.tenant(5, second.tokens[:32] + prompt_of(9, seed=5), GREEDY)
    driver.share(sharing, second, 32)
    successor = driver.tenant(3, prompt_of(11, seed=6), GREEDY)
    driver.generate([second, sharing, successor], 40, chunk=70)
    for tenant in (first, second, sharing, successor):
        assert_chosen(model, tenant)


def test_all_that_graphs_launch_is_compiled_ahead(monkeypatch):
    """By threads, several kernels at a time; the runner's own finds them when it captures."""
    by_runner, compiled = [], []

    def listener(*, src, **_):
        compiled.append(src.fn.__name__)
        if threading.current_thread() is threading.main_thread():
            by_runner.append(src.fn.__name__)

    model = model_of("llama", num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=5, hidden_size=768)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    build(model, num_rows=80)
    assert len(compiled) > 20
    assert set(by_runner) <= {"_page_table"}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_reads_what_another_computes_in_the_same_step(page_size, graphs):
    """Twins, a longer prompt and a decode row beside the one that brings their head."""
    model = model_of("llama")
    driver = build(model, page_size=page_size, graphs=graphs)
    decoding = driver.tenant(4, prompt_of(5, seed=1), GREEDY)
    driver.step([decoding])
    first = driver.tenant(0, prompt_of(33, seed=2), GREEDY)
    twin = driver.tenant(1, first.tokens, GREEDY)
    longer = driver.tenant(2, first.tokens[:32] + prompt_of(9, seed=3), GREEDY)
    for tenant in (twin, longer):
        driver.share(tenant, first, 32, in_step=True)
    tenants = [decoding, first, twin, longer]
    driver.step(tenants)
    driver.generate(tenants, 6)
    for tenant in tenants:
        assert_chosen(model, tenant)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shared_prefixes_are_read_once(family, page_size, graphs, monkeypatch):
    """Two families and a row alone, which join and leave; a prompt comes beside them."""
    from srt.executor.attention import flashinfer

    monkeypatch.setattr(flashinfer, "WORTH_SHARING", 1)
    model = model_of(family, num_attention_heads=12, num_key_value_heads=4)
    driver = build(model, num_rows=24, page_size=page_size, graphs=graphs)
    firsts = [driver.tenant(row, prompt_of(length, seed=row), GREEDY) for row, length in enumerate((250, 100, 40))]
    for _ in range(2):
        driver.step(firsts, chunk=160)
    tenants = list(firsts)
    for row in range(3, 20):
        donor, length = (firsts[0], 240) if row % 3 else (firsts[1], 64 + 16 * (row % 2))
        tenants.append(driver.tenant(row, donor.tokens[:length] + prompt_of(5 + row, seed=row), GREEDY))
        driver.share(tenants[-1], donor, length)
    driver.generate(tenants, 4, chunk=9)
    late = driver.tenant(20, prompt_of(60, seed=77), GREEDY)
    for _ in range(7):
        driver.step([*tenants, late], chunk=10)
    driver.generate([*tenants[::2], late], 14)
    for tenant in (*tenants, late):
        assert_chosen(model, tenant)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "near_tie"),
    [
        pytest.param(torch.float16, torch.float16, NEAR_TIE, marks=pytest.mark.slow, id="float16"),  # to compile
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, FP8_NEAR_TIE, id="fp8 cache"),
    ],
)
def test_other_types(family, dtype, kv_dtype, near_tie, graphs, monkeypatch):
    """Chunks that see much and chunks that see little, a shared prefix, decode rows."""
    from srt.executor.attention import flashinfer

    monkeypatch.setattr(flashinfer, "WORTH_SHARING", 1)
    model = model_of(family, dtype)
    driver = build(model, graphs=graphs, dtype=dtype, kv_dtype=kv_dtype)
    first = driver.tenant(0, prompt_of(200, seed=1), GREEDY)
    driver.step([first], chunk=180)
    sharing = [driver.tenant(row, first.tokens[:170] + prompt_of(row, seed=row), GREEDY) for row in (1, 2, 3)]
    for tenant in sharing:
        driver.share(tenant, first, 170)
    tenants = [first, *sharing]
    driver.generate(tenants, 20)
    for tenant in tenants:
        assert_chosen(model, tenant, near_tie)


@pytest.mark.parametrize(("num_rows", "graphs"), [(8, True), (32, True), (8, False)])
def test_drafts_give_the_tokens_of_one_after_the_other(num_rows, graphs):
    """As rows of a graph where they fit into one, else as chunks."""
    model = model_of("llama")
    driver = build(model, page_size=16, graphs=graphs, num_rows=num_rows)
    drawn = SamplingParams(max_new_tokens=1000, temperature=1.0, seed=5)
    tenants = [driver.tenant(row, prompt_of(5 + 40 * row, row), (GREEDY, drawn)[row % 2]) for row in range(6)]
    answers = driver.generate(tenants, 30)
    again = [driver.tenant(t.row, t.tokens[: t.prompt_len], t.sampling) for t in tenants]
    driver.generate_drafted(again, answers)
    for tenant in again:
        assert_chosen(model, tenant)


def test_every_batch_size_from_graphs():
    """Rows of 1 to 150 tokens; each step one row fewer, so that every graph is padded in every way.

    So many key heads that the larger batches fill the GPU without splitting a row's.
    """
    model = model_of("llama", num_attention_heads=12, num_key_value_heads=12)
    driver = build(model, num_rows=48, pool_tokens=16384)
    tenants = [driver.tenant(row, prompt_of(1 + 3 * row, seed=row), GREEDY) for row in range(48)]
    driver.step(tenants)
    while len(tenants) > 1:
        driver.step(tenants)
        assert_chosen(model, tenants.pop())
    assert_chosen(model, tenants[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_steps_launched_ahead_give_the_same_tokens(temperature):
    """Step n + 1 is launched before step n ran; a long enough run that a schedule overwritten too early would show."""
    model = model_of("llama")
    wanted = SamplingParams(max_new_tokens=1000, temperature=temperature, seed=5)
    outputs = []
    for ahead in (False, True):
        driver = build(model)
        tenants = [driver.tenant(row, prompt_of(40 * row + 3, seed=row), wanted) for row in range(3)]
        driver.step(tenants)
        output, previous = [], None
        for _ in range(200):
            batch, _ = driver.plan(tenants, 1)
            current = driver.runner.forward(batch)
            if previous is not None:
                output.append(driver.runner.result(previous).tokens.tolist())
            driver.runner.sample(current, None)
            previous = current
            if not ahead:
                torch.cuda.synchronize()
        output.append(driver.runner.result(previous).tokens.tolist())
        outputs.append(output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_are_drawn_by_seed_and_position(graphs):
    model = model_of("llama")
    driver = build(model, graphs=graphs)
    tenants = [
        driver.tenant(row, prompt_of(9, seed=row), SamplingParams(max_new_tokens=99, temperature=0.8, seed=2**40 + row))
        for row in range(6)
    ]
    driver.generate(tenants, 20)
    for tenant in tenants:
        assert_chosen(model, tenant)


@pytest.mark.parametrize("logprobs", [-1, 1])
@pytest.mark.parametrize("graphs", [True, False])
def test_masks_of_steps_launched_ahead(graphs, logprobs):
    """Three of seven rows have masks, new ones at each step; where one wants logprobs, logits are edited."""
    model = model_of("llama")
    driver = build(model, graphs=graphs)
    kinds = [SamplingParams(max_new_tokens=999, temperature=t, seed=5 + row) for row, t in enumerate((0.0, 1.0) * 3)]
    kinds.append(SamplingParams(max_new_tokens=999, temperature=0.0, logprobs=logprobs))
    tenants = [driver.tenant(row, prompt_of(9 + 20 * row, seed=row), kind) for row, kind in enumerate(kinds)]
    driver.step(tenants)
    places = np.array([1, 2, 4], np.int32)
    random = np.random.default_rng(2)
    every_bits = random.integers(-(2**31), 2**31, (60, 3, -(-VOCAB // 32))).astype(np.int32)
    every_bits &= random.integers(-(2**31), 2**31, every_bits.shape).astype(np.int32)
    tokens, previous = [], None
    for bits in every_bits:
        batch, _ = driver.plan(tenants, 1)
        current = driver.runner.forward(batch)
        if previous is not None:
            tokens.append(driver.runner.result(previous).tokens)
        driver.runner.sample(current, TokenMasks(places, bits))
        previous = current
    tokens.append(driver.runner.result(previous).tokens)
    for row, tenant in enumerate(tenants):
        tenant.tokens += [int(step[row]) for step in tokens]
    allowed = np.unpackbits(every_bits.view(np.uint8), axis=2, bitorder="little")[:, :, :VOCAB].astype(bool)
    for row, tenant in enumerate(tenants):
        masks = np.ones((61, VOCAB), bool)
        if row in places:
            masks[1:] = allowed[:, places.tolist().index(row)]
        assert masks[range(61), tenant.output].all()
        assert_chosen(model, tenant, allowed=torch.from_numpy(masks))


def test_filters_penalties_and_logprobs_beside_plain_rows():
    model = model_of("llama")
    driver = build(model)
    plain = driver.tenant(0, prompt_of(20, seed=1), GREEDY)
    forced = driver.tenant(
        1, prompt_of(20, seed=2), SamplingParams(max_new_tokens=99, temperature=1.0, top_k=1, logprobs=2)
    )
    biased = driver.tenant(
        2, prompt_of(20, seed=3), SamplingParams(max_new_tokens=99, temperature=0.0, logit_bias=((7, 1e4),))
    )
    result = None
    for _ in range(8):
        result = driver.step([plain, forced, biased])
    assert_chosen(model, plain)
    forced.sampling = GREEDY  # as which it is judged: the filter leaves only the best
    assert_chosen(model, forced)
    assert biased.output == [7] * 8
    assert result.logprobs.top_ids[1, 0] == forced.output[-1]
    assert result.logprobs.chosen[1] == pytest.approx(result.logprobs.top[1, 0])


@pytest.mark.parametrize("num_rows", [1, 20, 100])
def test_logits_are_not_rounded(num_rows):
    model = model_of("llama")
    config, device = our_config(model), torch.device("cuda", 0)
    ours = load_model(config, model.state_dict().items(), torch.bfloat16, device, context_length=64)
    x = torch.randn((num_rows, SIZES["hidden_size"]), device=device).bfloat16()
    expected = x.float() @ model.lm_head.weight.T
    torch.testing.assert_close(ours.logits(x), expected, rtol=1e-4, atol=1e-4)
    out = torch.empty_like(expected)
    assert torch.equal(ours.head.of_own(x, out), ours.logits(x))
