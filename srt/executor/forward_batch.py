"""L4, each rank: the tensors of one step, built once from the plan and the tables and read by every layer.

Shapes: N tokens, B rows, R decode rows, L positions up to the longest decode row, P positions of a chunk's row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from srt.executor.tables import RowTables
from srt.executor.upload import upload
from srt.scheduler.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens in the plan's order: R decode rows, one token each, then the prompt chunks one after the other."""

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor  # where each token's K/V goes
    num_decode: int
    plan: ScheduleBatch
    tables: RowTables
    logit_indices: torch.Tensor  # tokens whose logits are wanted, in order: see `sample_logits`
    sample_logits: torch.Tensor  # of those, the last token of each row that samples, in the plan's order

    @classmethod
    def build(cls, plan: ScheduleBatch, tables: RowTables) -> ForwardBatch:
        num_tokens = plan.num_tokens
        end_B = np.cumsum(plan.length)
        before_B = end_B - plan.length
        rows_N = np.repeat(plan.row, plan.length)
        positions_N = np.arange(num_tokens) + np.repeat(plan.start - before_B, plan.length)
        wanted_B = plan.start + plan.length - plan.first_logit
        wanted_before_B = np.cumsum(wanted_B) - wanted_B
        first_index_B = before_B + plan.first_logit - plan.start
        logit_indices = np.arange(int(wanted_B.sum())) + np.repeat(first_index_B - wanted_before_B, wanted_B)
        sample_logits = (wanted_before_B + wanted_B - 1)[plan.samples]

        rows, positions, logits, samples = upload(
            tables.slots_RP.device, rows_N, positions_N, logit_indices, sample_logits
        )
        return cls(
            ids_N=tables.tokens_RP[rows, positions],
            positions_N=positions,
            slots_N=tables.slots_RP[rows, positions].long(),
            num_decode=plan.num_decode,
            plan=plan,
            tables=tables,
            logit_indices=logits,
            sample_logits=samples,
        )
