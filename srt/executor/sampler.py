"""L4, each rank: from logits to tokens, every row by its own parameters.

In this order: penalties, logit bias, min_new_tokens, grammar mask; then greedy, or temperature, top-k, top-p, min-p and
the argmax of what is left plus Gumbel noise, which draws from the softmax (Maddison, Tarlow and Minka 2014). Ties go
to the lowest id. Equal logits at a filter's edge are all kept, so what a row keeps never depends on other rows.

Shapes: S sampled rows, V tokens that exist (the model's vocabulary may be padded beyond them), K candidates, M masked
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from srt.executor.noise import GumbelNoise, row_keys
from srt.executor.sampling_table import SamplingRows, SamplingTable
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks

FIRST_CANDIDATES = 256
"""How many of the likeliest tokens top-p looks at before it sorts them all."""


@dataclass(frozen=True)
class Sampled:
    tokens_S: torch.Tensor
    logprobs_S: torch.Tensor | None = None
    top_ids_SK: torch.Tensor | None = None
    top_logprobs_SK: torch.Tensor | None = None


class Sampler:
    def __init__(self, table: SamplingTable, num_tokens_vocab: int, device: torch.device):
        self._table = table
        self._num_tokens = num_tokens_vocab
        self._device = device
        self._noise = GumbelNoise(num_tokens_vocab, device)

    def __call__(
        self, logits_SV: torch.Tensor, plan: ScheduleBatch, tokens_RP: torch.Tensor, masks: TokenMasks | None
    ) -> Sampled:
        """`logits_SV` may be changed; `tokens_RP` is the token table, read for penalties."""
        rows_S = plan.row[plan.samples]
        positions_S = (plan.start + plan.length)[plan.samples].astype(np.int64)
        wanted = self._table.take(rows_S)
        logits_SV = logits_SV[:, : self._num_tokens].float()
        with_logprobs = bool((wanted.logprobs >= 0).any())
        logprobs_SV = logits_SV.log_softmax(-1) if with_logprobs else None

        self._edit(logits_SV, rows_S, positions_S, wanted, tokens_RP)
        if masks is not None:
            self._forbid(logits_SV, plan, masks)
        tokens_S = self._choose(logits_SV, positions_S, wanted)

        if logprobs_SV is None:
            return Sampled(tokens_S)
        chosen_S = logprobs_SV.gather(1, tokens_S[:, None])[:, 0]
        top_logprobs_SK, top_ids_SK = logprobs_SV.topk(min(int(wanted.logprobs.max()), self._num_tokens))
        return Sampled(tokens_S, chosen_S, top_ids_SK, top_logprobs_SK)

    def _edit(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        positions_S: np.ndarray,
        wanted: SamplingRows,
        tokens_RP: torch.Tensor,
    ) -> None:
        must_go_on_S = positions_S < wanted.min_end
        for index in np.flatnonzero(wanted.penalised | wanted.biased | must_go_on_S):
            logits_V, row = logits_SV[index], int(rows_S[index])
            opened = self._table.opened(row)
            if wanted.penalised[index]:
                penalise(logits_V, tokens_RP[row, : int(positions_S[index])], opened)
            if wanted.biased[index]:
                ids, values = zip(*opened.sampling.logit_bias, strict=True)
                logits_V.index_add_(
                    0,
                    torch.tensor(ids, device=self._device),
                    torch.tensor(values, dtype=torch.float32, device=self._device),
                )
            if must_go_on_S[index]:
                logits_V[torch.tensor(opened.stop_token_ids, device=self._device)] = -math.inf

    def _forbid(self, logits_SV: torch.Tensor, plan: ScheduleBatch, masks: TokenMasks) -> None:
        sample_of_row = np.cumsum(plan.samples) - 1
        allowed = np.unpackbits(masks.bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")
        allowed_MV = torch.from_numpy(allowed[:, : self._num_tokens]).to(self._device, torch.bool)
        rows_M = torch.from_numpy(sample_of_row[masks.batch_rows]).to(self._device)
        logits_SV[rows_M] = logits_SV[rows_M].masked_fill(~allowed_MV, -math.inf)

    def _choose(self, logits_SV: torch.Tensor, positions_S: np.ndarray, wanted: SamplingRows) -> torch.Tensor:
        drawn = np.flatnonzero(wanted.temperature > 0)
        if len(drawn) == 0:
            return logits_SV.argmax(-1)
        if len(drawn) == len(logits_SV):
            return self._draw(logits_SV, positions_S, wanted)
        tokens_S = logits_SV.argmax(-1)
        drawn_ = torch.from_numpy(drawn).to(self._device)
        tokens_S[drawn_] = self._draw(logits_SV[drawn_], positions_S[drawn], wanted.take(drawn))
        return tokens_S

    def _draw(self, logits_SV: torch.Tensor, positions_S: np.ndarray, wanted: SamplingRows) -> torch.Tensor:
        """All S rows have a temperature above 0."""
        scaled_SV = logits_SV / torch.from_numpy(wanted.temperature).to(self._device)[:, None]
        filtered = np.flatnonzero(wanted.filtered)
        if len(filtered):
            filtered_ = torch.from_numpy(filtered).to(self._device)
            kept_SV = scaled_SV[filtered_]
            kept_SV.masked_fill_(kept_SV < least_kept(kept_SV, wanted.take(filtered))[:, None], -math.inf)
            scaled_SV[filtered_] = kept_SV
        keys_S2 = torch.from_numpy(row_keys(wanted.seed, positions_S)).to(self._device)
        return scaled_SV.add_(self._noise(keys_S2)).argmax(-1)


def penalise(logits_V: torch.Tensor, tokens: torch.Tensor, opened: OpenedRow) -> None:
    """In place. Repetition as in Keskar et al. 2019 over prompt and output; the others, OpenAI's, over the output."""
    wanted = opened.sampling
    if wanted.repetition_penalty != 1:
        seen = logits_V[tokens]
        logits_V[tokens] = torch.where(seen > 0, seen / wanted.repetition_penalty, seen * wanted.repetition_penalty)
    output = tokens[opened.prompt_len :]
    if len(output):
        ids, counts = output.unique(return_counts=True)
        logits_V[ids] -= counts * wanted.frequency_penalty + wanted.presence_penalty


def least_kept(scaled_SV: torch.Tensor, wanted: SamplingRows) -> torch.Tensor:
    """The smallest logit/T that top-k, then top-p, then min-p keep, [S].

    top_p keeps the fewest likeliest tokens whose probability, renormalised over what top_k kept, reaches it; min_p
    keeps what is at least min_p times as likely as the likeliest.
    """
    num_tokens = scaled_SV.shape[1]
    device = scaled_SV.device
    # How many candidates are looked at may depend on other rows; what a row keeps does not.
    top_k_S = np.where(wanted.top_k > 0, np.minimum(wanted.top_k, num_tokens), num_tokens)
    limited = top_k_S < num_tokens
    count = min(max(int(top_k_S[limited].max(initial=0)), FIRST_CANDIDATES), num_tokens)
    while True:
        sorted_SK = scaled_SV.topk(count).values
        weight_SK = (sorted_SK - sorted_SK[:, :1]).exp_().double()
        reached_SK = weight_SK.cumsum(-1)
        last_S = torch.from_numpy(np.minimum(top_k_S, count) - 1).to(device)
        # The total of a row without top_k is over all tokens; softmax sums each row by itself, in one fixed order.
        of_top_k_S = reached_SK.gather(1, last_S[:, None])[:, 0]
        of_all_S = 1 / scaled_SV.softmax(-1).amax(-1).double()
        limited_S = torch.from_numpy(limited).to(device)
        goal_S = torch.where(limited_S, of_top_k_S, of_all_S) * torch.from_numpy(wanted.top_p).to(device)
        # Tokens before which the goal was not yet reached; rounding may keep even the last sum below a goal of 1.
        num_kept_S = 1 + (reached_SK < goal_S[:, None]).sum(-1)
        open_ended = ~limited & (wanted.top_p < 1)
        if count == num_tokens or not bool((num_kept_S.cpu().numpy()[open_ended] > count).any()):
            break
        count = num_tokens
    num_kept_S = torch.minimum(num_kept_S, last_S + 1)
    least_S = sorted_SK.gather(1, num_kept_S[:, None] - 1)[:, 0]
    unfiltered_S = torch.from_numpy(~limited & (wanted.top_p >= 1)).to(device)
    least_S = least_S.masked_fill(unfiltered_S, -math.inf)
    with np.errstate(divide="ignore"):
        min_p_S = torch.from_numpy(np.log(wanted.min_p)).to(device)
    return torch.maximum(least_S, sorted_SK[:, 0] + min_p_S)
