"""L4, each rank: the sampler of a CPU: from logits to tokens, every row by its own parameters.

In this order: penalties, logit bias, min_new_tokens, grammar mask; then greedy, or temperature, top-k, top-p, min-p and
the argmax of what is left plus Gumbel noise, which draws from the softmax (Maddison, Tarlow and Minka 2014). Ties go
to the lowest id. Equal logits at a filter's edge are all kept, so what a row keeps never depends on other rows.

Shapes: S sampled tokens, of which a row has several where a draft is checked, V tokens that exist (the model's
vocabulary may be padded beyond them), L sampled tokens whose log-probabilities are wanted, M masks of W words; R rows
and P positions of the token table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from srt.executor.logprobs import LogprobTensors, rate
from srt.executor.noise import Noise, row_keys
from srt.executor.sampling_table import SamplingRows, SamplingTable
from srt.kernels import cpu
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks

DEPTH = 12.0
"""Filters first look at tokens this far below the likeliest in logit/T, and at all of them where that is not enough."""

FEW_WORDS = 64
"""Of a mask: where no more of them allow anything, only what they allow is looked at."""


@dataclass(frozen=True)
class Sampled:
    tokens_S: torch.Tensor
    logprobs: LogprobTensors | None = None  # of these; zeros for rows that want none


class Sampler:
    def __init__(self, table: SamplingTable, num_tokens_vocab: int):
        self._table = table
        self._num_tokens = num_tokens_vocab
        self._noise = Noise(num_tokens_vocab)

    def __call__(
        self, logits_SV: torch.Tensor, plan: ScheduleBatch, tokens_RP: torch.Tensor, masks: TokenMasks | None
    ) -> Sampled:
        """`logits_SV` has the padding too and may be changed; `tokens_RP` is the token table, read for penalties."""
        rows_S, positions_S = plan.sampled_rows, plan.sampled_positions
        wanted = self._table.take(rows_S)
        padded_SV = logits_SV.float()
        logits_SV = padded_SV[:, : self._num_tokens]
        with_logprobs = torch.from_numpy(np.flatnonzero(wanted.logprobs >= 0))
        logprobs_LV = logits_SV[with_logprobs].log_softmax(-1) if len(with_logprobs) else None

        # A request may name any id that the model's vocabulary has.
        self._edit(padded_SV, rows_S, positions_S, wanted, tokens_RP)
        few: dict[int, torch.Tensor] = {}
        if masks is not None:
            few = self._forbid(logits_SV, masks, positions_S < wanted.min_end, wanted.temperature > 0)
        tokens_S = self._choose(logits_SV, positions_S, wanted, few)

        if logprobs_LV is None:
            return Sampled(tokens_S)
        wishes = [self._table.wishes(row) for row in rows_S[wanted.logprobs >= 0].tolist()]
        rated = rate(logprobs_LV, tokens_S[with_logprobs], int(wanted.logprobs.max()), wishes)
        spread = [torch.zeros((len(tokens_S), *each.shape[1:]), dtype=each.dtype) for each in rated]
        for whole, each in zip(spread, rated, strict=True):
            whole[with_logprobs] = each
        return Sampled(tokens_S, LogprobTensors(*spread))

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
                logits_V.index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
            if must_go_on_S[index]:
                stops = [token for token in opened.stop_token_ids if token < len(logits_V)]
                logits_V[torch.tensor(stops, dtype=torch.int64)] = -math.inf

    def _forbid(
        self, logits_SV: torch.Tensor, masks: TokenMasks, must_go_on_S: np.ndarray, draws_S: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """Returns, by place, the tokens that are allowed where one is drawn among few; those logits are not touched."""
        few: dict[int, torch.Tensor] = {}
        is_short = draws_S[masks.places] & (np.count_nonzero(masks.bits, axis=1) <= FEW_WORDS)
        for index in np.flatnonzero(is_short | must_go_on_S[masks.places]):
            place, ids = int(masks.places[index]), self._allowed(masks.bits[index])
            # A grammar at its end allows nothing but what min_new_tokens forbids; the grammar's word counts.
            if must_go_on_S[place] and len(ids) and float(logits_SV[place, ids].max()) == -math.inf:
                logits_SV[place, ids] = 0.0
            if is_short[index] and len(ids):
                few[place] = ids
        others = [index for index, place in enumerate(masks.places.tolist()) if place not in few]
        if others:
            self._forbid_in_place(logits_SV, masks.places[others], masks.bits[others])
        return few

    def _forbid_in_place(self, logits_SV: torch.Tensor, places_M: np.ndarray, bits_MW: np.ndarray) -> None:
        if cpu.AVAILABLE:
            cpu.forbid_(logits_SV, torch.from_numpy(places_M.astype(np.int64)), torch.from_numpy(bits_MW))
            return
        forbidden = np.unpackbits((~bits_MW).astype("<i4").view(np.uint8), axis=1, bitorder="little")
        forbidden_MV = torch.from_numpy(forbidden[:, : self._num_tokens]).view(torch.bool)
        for place, forbidden_V in zip(places_M.tolist(), forbidden_MV, strict=True):
            logits_SV[place].masked_fill_(forbidden_V, -math.inf)

    def _allowed(self, bits_W: np.ndarray) -> torch.Tensor:
        """int64, ascending."""
        words = np.flatnonzero(bits_W)
        places = np.flatnonzero(np.unpackbits(bits_W[words].astype("<i4").view(np.uint8), bitorder="little"))
        ids = words[places // 32] * 32 + places % 32
        return torch.from_numpy(ids[ids < self._num_tokens])

    def _choose(
        self, logits_SV: torch.Tensor, positions_S: np.ndarray, wanted: SamplingRows, few: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        draws = wanted.temperature > 0
        if not draws.any():
            return argmax(logits_SV)
        tokens_S = torch.empty(len(logits_SV), dtype=torch.int64)
        if not draws.all():
            greedy = torch.from_numpy(np.flatnonzero(~draws))
            tokens_S[greedy] = argmax(logits_SV[greedy])
        keys_S2 = row_keys(wanted.seed, positions_S)
        for index in np.flatnonzero(draws).tolist():
            ids = few.get(index)
            logits_V = logits_SV[index] if ids is None else logits_SV[index, ids]
            chosen = self._draw(logits_V, ids, keys_S2[index], wanted, index)
            tokens_S[index] = chosen if ids is None else ids[chosen]
        return tokens_S

    def _draw(
        self, logits_V: torch.Tensor, ids: torch.Tensor | None, key_2: np.ndarray, wanted: SamplingRows, index: int
    ) -> torch.Tensor:
        """A place among `logits_V`, which belong to these tokens, or to all."""
        scaled_V = logits_V.div_(float(wanted.temperature[index]))
        if not wanted.filtered[index]:
            return scaled_V.sub_(self._noise.negative_gumbel(key_2, ids)).argmax()
        kept = kept_tokens(scaled_V, int(wanted.top_k[index]), float(wanted.top_p[index]), float(wanted.min_p[index]))
        scores = scaled_V[kept].sub_(self._noise.negative_gumbel(key_2, kept if ids is None else ids[kept]))
        return kept[scores.argmax()]


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    return cpu.argmax(logits_SV) if cpu.AVAILABLE else logits_SV.argmax(-1)


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


def kept_tokens(scaled_V: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Ids, ascending, of the tokens that top-k, then top-p, then min-p keep of the logits/T of one row.

    top_p keeps the fewest likeliest tokens whose probability, renormalised over what top_k kept, reaches it; min_p
    keeps what is at least min_p times as likely as the likeliest.
    """
    best = float(scaled_V.max())
    if not math.isfinite(best):
        # A prompt on which the model overflows spoils its own output, not the server.
        return scaled_V.argmax()[None]
    total = float((scaled_V - best).exp_().sum()) if top_p < 1 and top_k == 0 else 0.0
    kept = (scaled_V >= best - DEPTH).nonzero()[:, 0]
    values = scaled_V[kept].numpy().astype(np.float64)
    if top_k > 0:
        decided = top_k <= len(values)
    elif top_p < 1:
        decided = np.exp(values - best).sum() >= top_p * total
    else:
        decided = math.log(min_p) >= -DEPTH
    if not decided:
        kept = (scaled_V > -math.inf).nonzero()[:, 0]
        values = scaled_V[kept].numpy().astype(np.float64)

    least = best + math.log(min_p) if min_p > 0 else -math.inf
    descending = np.sort(values)[::-1]
    if 0 < top_k < len(descending):
        descending = descending[:top_k]
        least = max(least, descending[-1])
    if top_p < 1:
        reached = np.cumsum(np.exp(descending - best))
        goal = top_p * (total if top_k == 0 else reached[-1])
        # Rounding may leave even the last sum below the goal.
        least = max(least, descending[min(int(np.searchsorted(reached, goal)), len(descending) - 1)])
    return kept[torch.from_numpy(values >= least)]
