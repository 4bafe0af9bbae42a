"""The sampler against a plain per-row reference in numpy and Python integers, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from srt.executor import sampler as sampler_module
from srt.executor.noise import Noise, row_keys
from srt.executor.sampler import Sampler
from srt.executor.sampling_table import SamplingTable
from srt.kernels import cpu
from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks

WORD = 2**32 - 1
LONG = 2**64 - 1


def reference_noise(seed: int, position: int, token: int) -> float:
    """The documented hash, written once more in Python's integers."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & LONG
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LONG
    z ^= z >> 31
    x = int32(token * 0x9E3779B9 + (z & WORD))
    x ^= x >> 16
    x = int32(x * 0x7FEB352D)
    x ^= int32(z >> 32)
    x ^= x >> 15
    x = int32(x * 0x846CA68B)
    x ^= x >> 16
    return -math.log(-math.log1p(-(x * 2.0**-31 * (1 - 2.0**-23) + 2.0**-33)))


def int32(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def reference_distribution(
    logits: np.ndarray,
    wanted: SamplingParams,
    tokens: Sequence[int],
    prompt_len: int,
    stop_token_ids: Sequence[int] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Logits after all edits and filters, divided by T; -inf where a token cannot come."""
    x = logits.astype(np.float64).copy()
    stop_token_ids = [token for token in stop_token_ids if token < len(x)]
    for token in {token for token in tokens if token < len(x)}:
        if wanted.repetition_penalty != 1:
            x[token] = x[token] / wanted.repetition_penalty if x[token] > 0 else x[token] * wanted.repetition_penalty
    output = list(tokens[prompt_len:])
    for token in set(output):
        x[token] -= wanted.presence_penalty + wanted.frequency_penalty * output.count(token)
    for token, bias in wanted.logit_bias:
        if token < len(x):
            x[token] += bias
    if len(output) < wanted.min_new_tokens:
        x[list(stop_token_ids)] = -np.inf
    if allowed is not None:
        x[~allowed] = -np.inf
    if wanted.temperature == 0:
        return x
    x /= wanted.temperature
    order = sorted(range(len(x)), key=lambda t: -x[t])
    kept = order[: wanted.top_k] if wanted.top_k > 0 else order
    p = np.exp(x[kept] - x[kept[0]])
    p /= p.sum()
    number, reached = 0, 0.0
    while number < len(kept) and (number == 0 or reached < wanted.top_p):
        reached += p[number]
        number += 1
    kept = kept[:number] if wanted.top_p < 1 else kept
    kept = [t for t in kept if math.exp(x[t] - x[order[0]]) >= wanted.min_p]
    filtered = np.full_like(x, -np.inf)
    filtered[kept] = x[kept]
    return filtered


class Bench:
    """Rows with their tokens, sampled once by the sampler under test."""

    def __init__(self, vocab: int, rows: list[tuple[SamplingParams, list[int], int, tuple[int, ...]]]):
        self.rows = rows
        self.table = SamplingTable(len(rows))
        self.tokens_RP = torch.zeros((len(rows), 256), dtype=torch.int64)
        for row, (wanted, tokens, prompt_len, stops) in enumerate(rows):
            self.table.open(OpenedRow(row, np.array(tokens, np.int32), prompt_len, wanted, stops))
            self.tokens_RP[row, : len(tokens)] = torch.tensor(tokens)
        self.sampler = Sampler(self.table, vocab)

    def plan(self, order: Sequence[int], samples: Sequence[bool] | None = None) -> ScheduleBatch:
        row = np.array(order, np.int32)
        end = np.array([len(self.rows[r][1]) for r in order], np.int32)
        one = np.ones(len(order), np.int32)
        sampling = np.ones(len(order), np.int32) if samples is None else np.array(samples, np.int32)
        return ScheduleBatch(0, (), len(order), row, end - one, one, end - one, sampling, end, np.zeros(0, np.int32))

    def sample(self, logits: torch.Tensor, order: Sequence[int] | None = None, masks: TokenMasks | None = None):
        order = range(len(self.rows)) if order is None else order
        with torch.inference_mode():
            return self.sampler(logits[list(order)].clone(), self.plan(order), self.tokens_RP, masks)


def random_rows(count: int, vocab: int) -> list[tuple[SamplingParams, list[int], int, tuple[int, ...]]]:
    rng = np.random.default_rng(5)
    rows = []
    for index in range(count):
        wanted = SamplingParams(
            max_new_tokens=100,
            min_new_tokens=int(rng.choice([0, 0, 4, 50])),
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 5, 40, 10_000])),
            top_p=float(rng.choice([1.0, 1.0, 0.9, 0.3, 0.999])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 0.3, 1.0])),
            seed=int(rng.integers(2**63)),
            presence_penalty=float(rng.choice([0.0, 0.0, 0.7, -0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
            logit_bias=() if index % 3 else ((3, 2.5), (7, -100.0), (vocab - 1, 1.25), (vocab + 2, 9.0)),
        )
        tokens = rng.integers(0, vocab, rng.integers(5, 60)).tolist()
        tokens[0] = vocab + 1  # a prompt may hold ids of the padding, and so may biases and stop tokens
        rows.append((wanted, tokens, int(rng.integers(1, len(tokens))), (2, 11, vocab + 4, 10**6)))
    return rows


VOCAB = 331


@pytest.fixture
def mixed():
    rows = random_rows(120, VOCAB)
    logits = torch.randn((len(rows), VOCAB + 5), generator=torch.Generator().manual_seed(3)) * 3
    logits[:, VOCAB:] = 1000.0  # padding of the vocabulary: likely, and yet never to be taken
    return Bench(VOCAB, rows), logits


@pytest.mark.parametrize(("few_words", "compiled"), [(0, True), (0, False), (2, True), (64, True)])
def test_every_row_as_the_reference(mixed, few_words, compiled, monkeypatch):
    monkeypatch.setattr(sampler_module, "FEW_WORDS", few_words)
    monkeypatch.setattr(cpu, "AVAILABLE", cpu.AVAILABLE and compiled)
    bench, logits = mixed
    masked = np.arange(0, 120, 4)
    allowed = np.random.default_rng(8).random((len(masked), VOCAB)) < 0.3
    allowed[::2, 64:] = False
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little").view(np.int32)
    tokens = bench.sample(logits, masks=TokenMasks(masked.astype(np.int32), bits)).tokens_S.tolist()
    for row, (wanted, known, prompt_len, stops) in enumerate(bench.rows):
        mask = allowed[list(masked).index(row)] if row in masked else None
        x = reference_distribution(logits[row, :VOCAB].numpy(), wanted, known, prompt_len, stops, mask)
        if wanted.temperature > 0:
            x += [reference_noise(wanted.seed, len(known), token) for token in range(VOCAB)]
        best = float(x.max())
        assert x[tokens[row]] >= best - 1e-4, f"row {row}: {wanted}"


def test_any_batch_gives_the_same_tokens(mixed):
    bench, logits = mixed
    together = bench.sample(logits).tokens_S
    order = np.random.default_rng(1).permutation(len(bench.rows))
    shuffled = bench.sample(logits, order=order.tolist()).tokens_S
    assert torch.equal(shuffled, together[torch.from_numpy(order)])
    for row in range(len(bench.rows)):
        assert bench.sample(logits, order=[row]).tokens_S.item() == together[row]


def test_noise_is_the_documented_function():
    noise = Noise(1003)
    seeds = np.array([0, 1, 2**63 - 1, 12345678901234567, 5])
    positions = np.array([0, 7, 131071, 2, 2])
    keys = row_keys(seeds, positions)
    some = torch.tensor([0, 3, 17, 500, 1002])
    for seed, position, key in zip(seeds.tolist(), positions.tolist(), keys, strict=True):
        every = noise.negative_gumbel(key).clone()
        expected = [-reference_noise(seed, position, token) for token in range(1003)]
        np.testing.assert_allclose(every.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(noise.negative_gumbel(key, some), every[some])


def test_noise_has_no_infinity_and_hardly_a_repetition():
    values = Noise(2**18).negative_gumbel(row_keys(np.array([3]), np.array([4]))[0])
    assert torch.isfinite(values).all()
    assert len(values.unique()) > 0.99 * len(values)
    assert values.double().mean().item() == pytest.approx(-0.5772, abs=1e-2)
    assert values.double().var().item() == pytest.approx(math.pi**2 / 6, abs=3e-2)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standardised: about N(0, 1) when the counts come from the probabilities. Rare tokens are pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 8
    seen = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(seen) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draws(logits_V: torch.Tensor, wanted: SamplingParams, count: int, by: str) -> np.ndarray:
    """`count` samples of one distribution, over consecutive positions of one seed or over consecutive seeds."""
    table = SamplingTable(count)
    for row in range(count):
        seed = wanted.seed + (row if by == "seed" else 0)
        values = {name: getattr(wanted, name) for name in SamplingParams.__struct_fields__} | {"seed": seed}
        table.open(OpenedRow(row, np.zeros(1, np.int32), 1, SamplingParams(**values), ()))
    end = np.arange(1, count + 1) if by == "position" else np.full(count, 17)
    one = np.ones(count, np.int64)
    rows = np.arange(count)
    plan = ScheduleBatch(
        0, (), count, rows, end - one, one, end - one, one.astype(np.int32), end, np.zeros(0, np.int32)
    )
    with torch.inference_mode():
        sampler = Sampler(table, len(logits_V))
        return sampler(logits_V.repeat(count, 1), plan, torch.zeros((count, 1)), None).tokens_S.numpy()


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_samples_follow_the_softmax(by, temperature):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    wanted = SamplingParams(max_new_tokens=1, temperature=temperature, seed=77)
    tokens = draws(logits, wanted, 6_000, by)
    probabilities = (logits.double() / temperature).softmax(0).numpy()
    assert abs(chi_square(np.bincount(tokens, minlength=300), probabilities)) < 4


@pytest.mark.parametrize(
    "filters", [{"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}]
)
def test_samples_follow_the_filtered_softmax(filters):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4)) * 2
    wanted = SamplingParams(max_new_tokens=1, temperature=0.9, seed=5, **filters)
    tokens = draws(logits, wanted, 3_000, "seed")
    filtered = torch.from_numpy(reference_distribution(logits.numpy(), wanted, [], 0))
    probabilities = filtered.softmax(0).numpy()
    assert set(tokens.tolist()) <= set(np.flatnonzero(probabilities).tolist())
    assert abs(chi_square(np.bincount(tokens, minlength=300), probabilities)) < 4


def test_top_p_that_needs_more_than_the_first_candidates():
    """A nearly flat distribution over 3,000 tokens: 0.9 of it takes more than lies within the first look."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(6)) * 0.3
    wanted = SamplingParams(max_new_tokens=1, top_p=0.9, seed=1)
    kept = np.isfinite(reference_distribution(logits.numpy(), wanted, [], 0))
    assert kept.sum() > 2000
    tokens = draws(logits, wanted, 1_500, "seed")
    assert kept[tokens].all()
    assert len(set(tokens.tolist())) > 800


@pytest.mark.parametrize("filters", [{"top_p": 1 - 1e-14}, {"min_p": 5e-324}, {"top_p": 1 - 1e-14, "min_p": 5e-324}])
def test_filters_too_weak_for_32_bits_remove_nothing(filters):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4))
    plain = SamplingParams(max_new_tokens=1, seed=3)
    weak = SamplingParams(max_new_tokens=1, seed=3, **filters)
    assert (draws(logits, weak, 50, "seed") == draws(logits, plain, 50, "seed")).all()


def test_two_seeds_differ():
    logits = torch.zeros(5000)
    first = draws(logits, SamplingParams(max_new_tokens=1, seed=1), 50, "position")
    second = draws(logits, SamplingParams(max_new_tokens=1, seed=2), 50, "position")
    assert (first != second).mean() > 0.9
    assert (first == draws(logits, SamplingParams(max_new_tokens=1, seed=1), 50, "position")).all()


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros((1, VOCAB))
    logits[0, [40, 90, 200]] = 2.0
    bench = Bench(VOCAB, [(SamplingParams(max_new_tokens=1, temperature=0.0), [1, 2], 2, ())])
    assert bench.sample(logits).tokens_S.tolist() == [40]


def test_logprobs_are_those_of_the_unedited_logits():
    wanted = SamplingParams(
        max_new_tokens=9, temperature=0.3, top_k=1, logit_bias=((4, 50.0),), logprobs=3, repetition_penalty=2.0
    )
    plain = SamplingParams(max_new_tokens=9, temperature=0.0)
    bench = Bench(VOCAB, [(wanted, [1, 2, 3], 2, ()), (plain, [5], 1, ())])
    logits = torch.randn((2, VOCAB), generator=torch.Generator().manual_seed(9))
    sampled = bench.sample(logits)
    assert sampled.tokens_S.tolist() == [4, int(logits[1].argmax())]
    expected = logits.double().log_softmax(-1)
    assert sampled.logprobs.chosen_P[0].item() == pytest.approx(expected[0, 4].item(), abs=1e-5)
    best = expected[0].topk(3)
    assert sampled.logprobs.top_ids_PK[0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(sampled.logprobs.top_PK[0].numpy(), best.values.numpy(), atol=1e-5)


def test_logprobs_without_alternatives():
    bench = Bench(VOCAB, [(SamplingParams(max_new_tokens=9, logprobs=0), [1], 1, ())])
    sampled = bench.sample(torch.randn((1, VOCAB)))
    assert sampled.logprobs.top_ids_PK.shape == (1, 0)
    assert sampled.logprobs.chosen_P.shape == (1,)


@pytest.mark.parametrize("few_words", [0, 64])
def test_a_grammar_at_its_end_wins_over_min_new_tokens(few_words, monkeypatch):
    monkeypatch.setattr(sampler_module, "FEW_WORDS", few_words)
    rows = [
        (SamplingParams(max_new_tokens=9, min_new_tokens=5, temperature=t, top_p=p), [1], 1, (9,))
        for t, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5))
    ]
    bench = Bench(64, rows)
    bits = np.zeros((3, 2), np.int32)
    bits[:, 0] = 1 << 9
    masks = TokenMasks(np.arange(3, dtype=np.int32), bits)
    assert bench.sample(torch.randn((3, 64)), masks=masks).tokens_S.tolist() == [9, 9, 9]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_logits_that_are_no_numbers_spoil_their_own_row_only(filters):
    rows = [(SamplingParams(max_new_tokens=9, seed=row, **filters), [1], 1, ()) for row in range(3)]
    bench = Bench(VOCAB, rows)
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))
    expected = bench.sample(logits).tokens_S
    for bad in (math.nan, math.inf):
        broken = logits.clone()
        broken[1] = bad
        tokens = bench.sample(broken).tokens_S
        assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert 0 <= tokens[1] < VOCAB


def test_masks_follow_the_samples_not_the_plan_rows():
    """The second of three rows does not sample; the mask is the third's."""
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    bench = Bench(64, [(greedy, [1], 1, ())] * 3)
    logits = torch.arange(64.0).repeat(2, 1)
    bits = np.zeros((1, 2), np.int32)
    bits[0, 0] = 1 << 5
    with torch.inference_mode():
        plan = bench.plan([0, 1, 2], samples=[True, False, True])
        sampled = bench.sampler(logits, plan, bench.tokens_RP, TokenMasks(np.array([1], np.int32), bits))
    assert sampled.tokens_S.tolist() == [63, 5]


def drafted_plan(known: Sequence[int], drafted: Sequence[int]) -> ScheduleBatch:
    """Row i has `known[i]` tokens and `drafted[i]` more to check: the last known one and all of these are computed."""
    start, size = np.array(known, np.int32) - 1, np.array(drafted, np.int32) + 1
    row = np.arange(len(known), dtype=np.int32)
    return ScheduleBatch(
        0, (), 0, row, start, size, start, size, start + size, np.zeros(0, np.int32), num_drafted=len(known)
    )


def drafted_bench(bench: Bench, drafted: Sequence[int]) -> Bench:
    """Its rows, each once more for every token of its draft, as they are when that one has been said."""
    rows = []
    for (wanted, tokens, prompt_len, stops), more in zip(bench.rows, drafted, strict=True):
        known = len(tokens) - more
        rows += [(wanted, tokens[: known + said], min(prompt_len, known), stops) for said in range(more + 1)]
    return Bench(VOCAB, rows)


def test_behind_a_draft_tokens_are_what_they_would_be_one_after_the_other(mixed):
    bench, _ = mixed
    drafted = [row % 4 for row in range(len(bench.rows))]
    known = [len(tokens) - more for (_, tokens, _, _), more in zip(bench.rows, drafted, strict=True)]
    rows = [(w, t, min(p, k), s) for (w, t, p, s), k in zip(bench.rows, known, strict=True)]
    bench, single = Bench(VOCAB, rows), drafted_bench(bench, drafted)
    count = len(single.rows)
    logits = torch.randn((count, VOCAB + 5), generator=torch.Generator().manual_seed(4)) * 3
    masked = np.arange(0, count, 3, dtype=np.int32)
    allowed = np.random.default_rng(8).random((len(masked), VOCAB)) < 0.3
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little").view(np.int32)
    masks = TokenMasks(masked, bits)
    with torch.inference_mode():
        together = bench.sampler(logits.clone(), drafted_plan(known, drafted), bench.tokens_RP, masks)
    assert torch.equal(together.tokens_S, single.sample(logits, masks=masks).tokens_S)
