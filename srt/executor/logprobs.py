"""L4, each rank: log-probabilities of tokens, and of what else was likely there. Before penalties and filters.

Shapes: P positions, V tokens that exist, K alternatives, A ids asked for by name, L tokens whose logits are wanted, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from srt.executor.forward_batch import ForwardBatch
from srt.executor.upload import upload
from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import Logprobs

PIECE = 256
"""Positions of prompts whose logits are in memory at the same time."""


class LogprobTensors(NamedTuple):
    """`Logprobs` on the device."""

    chosen_P: torch.Tensor
    top_ids_PK: torch.Tensor
    top_PK: torch.Tensor
    asked_PA: torch.Tensor

    def to_arrays(self) -> Logprobs:
        """Waits for the device, unless the tensors are on the host already."""
        chosen, top_ids, top, asked = (each.cpu().numpy() for each in self)
        return Logprobs(chosen, top_ids.astype(np.int32), top, asked)


def rate(
    logprobs_PV: torch.Tensor, tokens_P: torch.Tensor, num_top: int, wishes: Sequence[SamplingParams]
) -> LogprobTensors:
    """`wishes` has one entry per position."""
    top_PK, top_ids_PK = logprobs_PV.topk(min(num_top, logprobs_PV.shape[1]))
    chosen_P = logprobs_PV.gather(1, tokens_P.long()[:, None])[:, 0]
    asked_PA = logprobs_PV.gather(1, _padded_ids(wishes, logprobs_PV))
    return LogprobTensors(chosen_P, top_ids_PK, top_PK, asked_PA)


def rate_prompts(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden_LD: torch.Tensor,
    batch: ForwardBatch,
    wishes_of: Callable[[int], SamplingParams],
    num_tokens_vocab: int,
) -> LogprobTensors | None:
    """Of the batch's `rated_tokens`, piece by piece; None if there are none."""
    if len(batch.rated_rows) == 0:
        return None
    wishes = [wishes_of(row) for row in batch.rated_rows.tolist()]
    num_top = max(each.prompt_logprobs for each in wishes)
    num_asked = max(len(each.logprob_ids) for each in wishes)
    hidden_PD = hidden_LD[batch.num_samples :]
    pieces = []
    for start in range(0, len(wishes), PIECE):
        piece = slice(start, start + PIECE)
        logits_PV = logits_of(hidden_PD[piece])[:, :num_tokens_vocab]
        rated = rate(logits_PV.float().log_softmax(-1), batch.rated_tokens[piece], num_top, wishes[piece])
        missing = num_asked - rated.asked_PA.shape[1]
        pieces.append(rated._replace(asked_PA=torch.nn.functional.pad(rated.asked_PA, (0, missing))))
    return LogprobTensors(*map(torch.cat, zip(*pieces, strict=True)))


def _padded_ids(wishes: Sequence[SamplingParams], logprobs_PV: torch.Tensor) -> torch.Tensor:
    """Ids beyond those that exist are rated like the first one."""
    most = max(len(each.logprob_ids) for each in wishes)
    if most == 0:
        return torch.zeros((len(wishes), 0), dtype=torch.int64, device=logprobs_PV.device)
    ids_PA = np.zeros((len(wishes), most), np.int64)
    for line, each in zip(ids_PA, wishes, strict=True):
        line[: len(each.logprob_ids)] = each.logprob_ids
    ids_PA[ids_PA >= logprobs_PV.shape[1]] = 0
    (ids,) = upload(logprobs_PV.device, ids_PA.reshape(-1))
    return ids.long().reshape(ids_PA.shape)
