"""L4, each rank: the sampler of a GPU: `srt/executor/sampler.py`'s semantics for all rows at once, never waited for.

Most batches want nothing but a temperature and perhaps a grammar's mask: they take `draw`, which a CUDA graph may hold.
The others take the kernels of edits and filters before.

Shapes: R table rows, S sampled tokens, V tokens that exist, W of this rank's part of the vocabulary, P positions,
C parameters, M edits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from srt.executor.logprobs import rate
from srt.executor.sampler import Sampled
from srt.executor.sampling_table import SamplingRows, SamplingTable
from srt.executor.upload import upload
from srt.kernels import sampling
from srt.kernels.edits import Biases, Masks, Penalties
from srt.messages import SamplingParams
from srt.parallel import ParallelContext
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class CudaSampler:
    def __init__(
        self,
        num_rows: int,
        num_tokens_vocab: int,
        device: torch.device,
        parallel: ParallelContext,
        own_tokens: range,
    ):
        """One more row than the table's stands for the padding of a graph: it is greedy.

        `own_tokens` are those of the `num_tokens_vocab` whose logits this rank computes.
        """
        self._table = SamplingTable(num_rows)
        self._num_tokens = num_tokens_vocab
        self._parallel = parallel
        self._own_tokens = own_tokens
        self._device = device
        self._floats_CR = torch.zeros((len(FLOATS), num_rows + 1), dtype=torch.float32, device=device)
        self._integers_CR = torch.zeros((3, num_rows + 1), dtype=torch.int64, device=device)  # seed, top_k, prompt_len

    def open(self, opened: Sequence[OpenedRow]) -> None:
        if not opened:
            return
        for each in opened:
            self._table.open(each)
        integers = [(each.row, each.sampling.seed, each.sampling.top_k, each.prompt_len) for each in opened]
        floats = [[getattr(each.sampling, name) for name in FLOATS] for each in opened]
        rows, *integers_C = upload(self._device, *np.array(integers, np.int64).T)
        self._integers_CR[:, rows] = torch.stack(integers_C)
        self._floats_CR[:, rows] = torch.stack(upload(self._device, *np.array(floats).T, dtype=torch.float32))

    def wishes(self, row: int) -> SamplingParams:
        return self._table.wishes(row)

    def upload(self, masks: TokenMasks, num_sampled: int) -> Masks:
        """On the device, on the stream that is current; `num_sampled` may be more than there are."""
        indices_S = np.full(num_sampled, -1)
        indices_S[masks.places] = np.arange(len(masks.bits))
        indices, bits = upload(self._device, indices_S, masks.bits.reshape(-1), dtype=torch.int32)
        return Masks(indices, bits.view(masks.bits.shape))

    def only_draws(self, plan: ScheduleBatch) -> bool:
        """Whether `draw` is all that these rows want."""
        wanted = self._table.take(plan.sampled_rows)
        more = wanted.penalised | wanted.biased | wanted.filtered | (wanted.logprobs >= 0)
        return not (more | (plan.sampled_positions < wanted.min_end)).any()

    def draw(
        self, logits_SW: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor, masks: Masks | None
    ) -> torch.Tensor:
        """int32 tokens that will stand at `positions_S`: greedy or drawn at the row's temperature.

        From the logits of this rank's tokens; each rank tells the others no more than the best of its own.
        """
        temperature_S, seeds_S = self._floats_CR[0, rows_S], self._integers_CR[0, rows_S]
        own = self._own_tokens
        best_2S = sampling.best_of_shard(logits_SW, temperature_S, seeds_S, positions_S, own, masks=masks)
        if self._parallel.size == 1:
            return best_2S[1].view(torch.int32)
        return sampling.best_of_shards(self._parallel.all_gather(best_2S))

    def __call__(
        self,
        logits_SV: torch.Tensor,
        plan: ScheduleBatch,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        tokens_RP: torch.Tensor,
        masks: Masks | None,
    ) -> Sampled:
        """`logits_SV` has the vocabulary's padding too; `tokens_RP` is the token table, read for penalties."""
        wanted = self._table.take(plan.sampled_rows)
        temperature_S, top_p_S, min_p_S, *penalties = self._floats_CR[:, rows_S]
        seeds_S, top_k_S, prompt_lens_S = self._integers_CR[:, rows_S]
        tokens_S = sampling.filtered(
            logits_SV,
            temperature_S,
            seeds_S,
            positions_S,
            self._num_tokens,
            top_k_S,
            top_p_S,
            min_p_S,
            Penalties(*penalties, rows_S, positions_S, prompt_lens_S, tokens_RP) if wanted.penalised.any() else None,
            self._biases(plan, wanted),
            masks,
        )
        if not (wanted.logprobs >= 0).any():
            return Sampled(tokens_S)
        logprobs_SV = logits_SV[:, : self._num_tokens].float().log_softmax(-1)
        wishes = [self._table.wishes(row) for row in plan.sampled_rows.tolist()]
        return Sampled(tokens_S, rate(logprobs_SV, tokens_S, int(wanted.logprobs.max()), wishes))

    def _biases(self, plan: ScheduleBatch, wanted: SamplingRows) -> Biases | None:
        """Logit biases, and the stop tokens of rows that must go on."""
        rows_S, must_go_on_S = plan.sampled_rows, plan.sampled_positions < wanted.min_end
        edits = []
        for index in np.flatnonzero(wanted.biased | must_go_on_S):
            opened = self._table.opened(int(rows_S[index]))
            edits += [(index, token, value) for token, value in opened.sampling.logit_bias]
            if must_go_on_S[index]:
                edits += [(index, token, -math.inf) for token in opened.stop_token_ids]
        if not edits:
            return None
        indices_M, ids_M, values_M = (np.array(column) for column in zip(*edits, strict=True))
        indices_M, ids_M = upload(self._device, indices_M, ids_M)
        return Biases(indices_M, ids_M, *upload(self._device, values_M, dtype=torch.float32))
