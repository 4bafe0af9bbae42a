"""L4, each rank: the sampler of a GPU: `srt/executor/sampler.py`'s semantics for all rows at once, never waited for.

Most batches want nothing but a temperature: they take `draw`, which a CUDA graph may hold. The others have their logits
edited first, so that what may not come is -inf, and then take it too.

Shapes: R table rows, S sampled rows, V tokens that exist, P positions, E edits, K candidates, M masked rows, W words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from srt.executor.sampler import Sampled
from srt.executor.sampling_table import SamplingRows, SamplingTable
from srt.executor.upload import upload, upload_floats
from srt.kernels import sampling
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks


class CudaSampler:
    def __init__(self, num_rows: int, num_tokens_vocab: int, device: torch.device):
        """One more row than the table's stands for the padding of a graph: it is greedy."""
        self._table = SamplingTable(num_rows)
        self._num_tokens = num_tokens_vocab
        self._device = device
        self._temperature_R = torch.zeros(num_rows + 1, dtype=torch.float32, device=device)
        self._seed_R = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def open(self, opened: Sequence[OpenedRow]) -> None:
        if not opened:
            return
        for each in opened:
            self._table.open(each)
        rows = np.array([each.row for each in opened])
        wanted = self._table.take(rows)
        rows_, seeds = upload(self._device, rows, wanted.seed)
        self._seed_R[rows_] = seeds
        (self._temperature_R[rows_],) = upload_floats(self._device, wanted.temperature)

    def only_draws(self, plan: ScheduleBatch, masks: TokenMasks | None) -> bool:
        """Whether `draw` is all that these rows want."""
        wanted = self._table.take(plan.row[plan.samples])
        return masks is None and not edited(wanted, ends(plan)).any() and not (wanted.logprobs >= 0).any()

    def draw(self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """int32 tokens that will stand at `positions_S`: greedy or drawn at the row's temperature."""
        return sampling.gumbel_argmax(
            logits_SV, self._temperature_R[rows_S], self._seed_R[rows_S], positions_S, self._num_tokens
        )

    def __call__(
        self,
        logits_SV: torch.Tensor,
        plan: ScheduleBatch,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        tokens_RP: torch.Tensor,
        masks: TokenMasks | None,
    ) -> Sampled:
        """`logits_SV` has the vocabulary's padding too; `tokens_RP` is the token table, read for penalties."""
        wanted = self._table.take(plan.row[plan.samples])
        raw_SV = logits_SV.float()
        padded_SV = raw_SV.clone()
        # A request may name any id that the model's vocabulary has.
        self._edit(padded_SV, plan.row[plan.samples], ends(plan), wanted, tokens_RP)
        edited_SV = padded_SV[:, : self._num_tokens]
        if masks is not None:
            self._forbid(edited_SV, plan, masks)
        if wanted.filtered.any():
            filter_(edited_SV, *self._filters(wanted))
        tokens_S = self.draw(edited_SV, rows_S, positions_S)
        if not (wanted.logprobs >= 0).any():
            return Sampled(tokens_S)
        logprobs_SV = raw_SV[:, : self._num_tokens].log_softmax(-1)
        top_logprobs_SK, top_ids_SK = logprobs_SV.topk(min(max(int(wanted.logprobs.max()), 0), self._num_tokens))
        chosen_S = logprobs_SV.gather(1, tokens_S.long()[:, None])[:, 0]
        return Sampled(tokens_S, chosen_S, top_ids_SK, top_logprobs_SK)

    def _filters(self, wanted: SamplingRows) -> list[torch.Tensor]:
        """Temperature, top-k, top-p and min-p of each row, with values that filter nothing where none is wanted."""
        unfiltered = ~wanted.filtered
        columns = (
            np.where(wanted.temperature > 0, wanted.temperature, 1.0),
            np.where(unfiltered | (wanted.top_k == 0), self._num_tokens, wanted.top_k),
            np.where(unfiltered, 1.0, wanted.top_p),
            np.where(unfiltered, 0.0, wanted.min_p),
        )
        return [column[:, None] for column in upload_floats(self._device, *columns)]

    def _edit(
        self,
        logits_SV: torch.Tensor,
        row_S: np.ndarray,
        end_S: np.ndarray,
        wanted: SamplingRows,
        tokens_RP: torch.Tensor,
    ) -> None:
        for index in np.flatnonzero(wanted.penalised):
            opened = self._table.opened(int(row_S[index]))
            penalise(logits_SV[index], tokens_RP[row_S[index], : int(end_S[index])].long(), opened)
        biases, stops = [], []
        for index in np.flatnonzero(wanted.biased):
            opened = self._table.opened(int(row_S[index]))
            biases += [(index, token, value) for token, value in opened.sampling.logit_bias]
        for index in np.flatnonzero(end_S < wanted.min_end):
            stop_ids = self._table.opened(int(row_S[index])).stop_token_ids
            stops += [(index, token) for token in stop_ids if token < logits_SV.shape[1]]
        if biases:
            index_E, token_E, value_E = (np.array(column) for column in zip(*biases, strict=True))
            (values,) = upload_floats(self._device, value_E)
            logits_SV.index_put_(upload(self._device, index_E, token_E), values, accumulate=True)
        if stops:
            at_E, ids_E = upload(self._device, *(np.array(column) for column in zip(*stops, strict=True)))
            logits_SV[at_E, ids_E] = -math.inf

    def _forbid(self, logits_SV: torch.Tensor, plan: ScheduleBatch, masks: TokenMasks) -> None:
        sample_of_row = np.cumsum(plan.samples) - 1
        rows_M, words = upload(self._device, sample_of_row[masks.batch_rows], masks.bits.reshape(-1))
        words_MW1 = words.view(len(rows_M), -1, 1)
        bits_MW32 = (words_MW1 >> torch.arange(32, device=self._device)) & 1
        allowed_MV = bits_MW32.flatten(1)[:, : logits_SV.shape[1]].bool()
        masked_MV = logits_SV[rows_M].masked_fill(~allowed_MV, -math.inf)
        # A grammar at its end allows nothing but what min_new_tokens forbids; the grammar's word counts.
        nothing_M1 = masked_MV.amax(-1, keepdim=True) == -math.inf
        logits_SV[rows_M] = masked_MV.masked_fill_(nothing_M1 & allowed_MV, 0.0)


def ends(plan: ScheduleBatch) -> np.ndarray:
    """Positions of the tokens that are sampled."""
    return (plan.start + plan.length)[plan.samples].astype(np.int64)


def edited(wanted: SamplingRows, end_S: np.ndarray) -> np.ndarray:
    return wanted.penalised | wanted.biased | wanted.filtered | (end_S < wanted.min_end)


def penalise(logits_V: torch.Tensor, tokens: torch.Tensor, opened: OpenedRow) -> None:
    """In place, as the CPU's, without the list of distinct tokens, whose length the host would have to wait for."""
    wanted = opened.sampling
    if wanted.repetition_penalty != 1:
        seen = logits_V[tokens]
        logits_V[tokens] = torch.where(seen > 0, seen / wanted.repetition_penalty, seen * wanted.repetition_penalty)
    output = tokens[opened.prompt_len :]
    counts_V = torch.zeros_like(logits_V).index_add_(0, output, torch.ones_like(output, dtype=logits_V.dtype))
    logits_V -= counts_V * wanted.frequency_penalty + (counts_V > 0) * wanted.presence_penalty


def filter_(
    logits_SV: torch.Tensor,
    temperature_S1: torch.Tensor,
    top_k_S1: torch.Tensor,
    top_p_S1: torch.Tensor,
    min_p_S1: torch.Tensor,
) -> None:
    """Top-k, then top-p over what is left, then min-p, as `kept_tokens` has them; what they remove becomes -inf."""
    scaled_SV = logits_SV / temperature_S1
    values_SV = scaled_SV.sort(-1, descending=True).values
    best_S1 = values_SV[:, :1]
    last_S1 = top_k_S1.long().clamp(max=values_SV.shape[1]) - 1
    weights_SV = (values_SV - best_S1).exp()
    weights_SV.masked_fill_(torch.arange(values_SV.shape[1], device=logits_SV.device) > last_S1, 0.0)
    reached_SV = weights_SV.cumsum(-1)
    goal_S1 = top_p_S1 * reached_SV.gather(1, last_S1)
    enough_S1 = (reached_SV < goal_S1).sum(-1, keepdim=True)
    place_S1 = torch.where(top_p_S1 < 1, torch.minimum(enough_S1, last_S1), last_S1)
    least_S1 = torch.maximum(values_SV.gather(1, place_S1), best_S1 + min_p_S1.log())
    # Not "< least": a row of numbers that are none keeps all, and spoils only itself.
    logits_SV.masked_fill_(scaled_SV < least_S1, -math.inf)
