"""The GPU's sampler against the same per-row reference as the CPU's; without a GPU its kernels are interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sampler import VOCAB, Bench, random_rows, reference_distribution, reference_noise

from srt.messages import SamplingParams
from srt.parallel import ParallelContext
from srt.scheduler.schedule_batch import OpenedRow, TokenMasks

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU kernels run compiled")
    return torch.device(request.param)


class CudaBench(Bench):
    def __init__(self, vocab: int, rows, device: torch.device):
        super().__init__(vocab, rows)
        from srt.executor.cuda_sampler import CudaSampler

        self.device = device
        self.tokens_RP = self.tokens_RP.int().to(device)
        self.cuda_sampler = CudaSampler(len(rows), vocab, device, ParallelContext(), range(vocab))
        self.cuda_sampler.open(
            [OpenedRow(row, np.array(t, np.int32), n, wanted, stops) for row, (wanted, t, n, stops) in enumerate(rows)]
        )

    def sample(self, logits, order=None, masks=None):
        order = list(range(len(self.rows)) if order is None else order)
        plan = self.plan(order)
        rows_S = torch.tensor(order, device=self.device)
        positions_S = torch.tensor([len(self.rows[row][1]) for row in order], device=self.device)
        with torch.inference_mode():
            logits = logits[order].to(self.device)
            masks = None if masks is None else self.cuda_sampler.upload(masks, len(order))
            return self.cuda_sampler(logits, plan, rows_S, positions_S, self.tokens_RP, masks)


def test_every_row_as_the_reference(device):
    rows = random_rows(60 if device.type == "cuda" else 20, VOCAB)
    logits = torch.randn((len(rows), VOCAB + 5), generator=torch.Generator().manual_seed(3)) * 3
    logits[:, VOCAB:] = 1000.0
    masked = np.arange(0, len(rows), 4)
    allowed = np.random.default_rng(8).random((len(masked), VOCAB)) < 0.3
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little").view(np.int32)
    bench = CudaBench(VOCAB, rows, device)
    tokens = bench.sample(logits, masks=TokenMasks(masked.astype(np.int32), bits)).tokens_S.tolist()
    for row, (wanted, known, prompt_len, stops) in enumerate(rows):
        mask = allowed[list(masked).index(row)] if row in masked else None
        x = reference_distribution(logits[row, :VOCAB].numpy(), wanted, known, prompt_len, stops, mask)
        if wanted.temperature > 0:
            x += [reference_noise(wanted.seed, len(known), token) for token in range(VOCAB)]
        assert x[tokens[row]] >= float(x.max()) - 1e-3, f"row {row}: {wanted}"


def test_any_batch_gives_the_tokens_of_the_cpu(device):
    rows = random_rows(24 if device.type == "cuda" else 6, VOCAB)
    logits = torch.randn((len(rows), VOCAB + 5), generator=torch.Generator().manual_seed(3)) * 3
    bench = CudaBench(VOCAB, rows, device)
    together = bench.sample(logits).tokens_S.tolist()
    assert Bench(VOCAB, rows).sample(logits).tokens_S.tolist() == together
    assert [bench.sample(logits, order=[row]).tokens_S.item() for row in range(len(rows))] == together


def test_logprobs_are_those_of_the_unedited_logits(device):
    wanted = SamplingParams(max_new_tokens=9, temperature=0.3, top_k=1, logit_bias=((4, 50.0),), logprobs=3)
    plain = SamplingParams(max_new_tokens=9, temperature=0.0)
    bench = CudaBench(VOCAB, [(wanted, [1, 2, 3], 2, ()), (plain, [5], 1, ())], device)
    logits = torch.randn((2, VOCAB), generator=torch.Generator().manual_seed(9))
    sampled = bench.sample(logits)
    assert sampled.tokens_S.tolist() == [4, int(logits[1].argmax())]
    expected = logits.double().log_softmax(-1)
    assert sampled.logprobs.chosen_P[0].item() == pytest.approx(expected[0, 4].item(), abs=1e-5)
    best = expected[0].topk(3)
    assert sampled.logprobs.top_ids_PK[0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(sampled.logprobs.top_PK[0].cpu().numpy(), best.values.numpy(), atol=1e-5)


def test_a_grammar_at_its_end_wins_over_min_new_tokens(device):
    rows = [
        (SamplingParams(max_new_tokens=9, min_new_tokens=5, temperature=t, top_p=p), [1], 1, (9,))
        for t, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5))
    ]
    bits = np.zeros((3, 2), np.int32)
    bits[:, 0] = 1 << 9
    masks = TokenMasks(np.arange(3, dtype=np.int32), bits)
    assert CudaBench(64, rows, device).sample(torch.randn((3, 64)), masks=masks).tokens_S.tolist() == [9, 9, 9]


def test_logits_that_are_no_numbers_spoil_their_own_row_only(device):
    rows = [(SamplingParams(max_new_tokens=9, seed=row, top_p=0.5), [1], 1, ()) for row in range(3)]
    bench = CudaBench(VOCAB, rows, device)
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))
    expected = bench.sample(logits).tokens_S
    for bad in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[1] = bad
        tokens = bench.sample(broken).tokens_S
        assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert 0 <= tokens[1] < VOCAB


def test_masks_follow_the_samples_not_the_plan_rows(device):
    """The second of three rows does not sample; the mask is the third's."""
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    bench = CudaBench(64, [(greedy, [1], 1, ())] * 3, device)
    bits = np.zeros((1, 2), np.int32)
    bits[0, 0] = 1 << 5
    plan = bench.plan([0, 1, 2], samples=[True, False, True])
    rows_S, positions_S = torch.tensor([0, 2], device=device), torch.tensor([1, 1], device=device)
    logits = torch.arange(64.0, device=device).repeat(2, 1)
    masks = bench.cuda_sampler.upload(TokenMasks(np.array([1], np.int32), bits), 2)
    assert bench.cuda_sampler(logits, plan, rows_S, positions_S, bench.tokens_RP, masks).tokens_S.tolist() == [63, 5]


def test_rows_that_want_a_mask_and_a_temperature_are_drawn_at_once(device):
    """As the kernels of edits have it."""
    rows = [(SamplingParams(max_new_tokens=9, seed=row, temperature=row % 3 / 2), [1], 1, ()) for row in range(6)]
    bench = CudaBench(VOCAB, rows, device)
    logits = torch.randn((6, VOCAB + 5), generator=torch.Generator().manual_seed(1))
    logits[:, VOCAB:] = 1000.0
    places = np.array([1, 2, 4], np.int32)
    masks = TokenMasks(places, np.random.default_rng(3).integers(0, 2**31, (3, VOCAB // 32 + 1)).astype(np.int32))
    plan, order = bench.plan(list(range(6))), torch.arange(6, device=device)
    assert bench.cuda_sampler.only_draws(plan)
    with torch.inference_mode():
        tokens_S = bench.cuda_sampler.draw(logits.to(device), order, order * 0 + 1, bench.cuda_sampler.upload(masks, 8))
    assert tokens_S.tolist() == bench.sample(logits, masks=masks).tokens_S.tolist()
    for place, bits_W in zip(places, masks.bits, strict=True):
        token = tokens_S[place].item()
        assert bits_W[token // 32] >> token % 32 & 1
