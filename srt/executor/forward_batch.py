"""L4, each rank: the tensors of one step, built once from the plan and the tables and read by every layer.

Shapes: N tokens, B rows; R rows and P positions of the tables.
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
    """Tokens in the plan's order: decode rows, one token each, then those with a draft and prompt chunks."""

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor  # where each token's K/V goes
    num_decode: int
    plan: ScheduleBatch
    tables: RowTables
    logit_indices: torch.Tensor  # tokens whose logits are wanted: first those that a token is sampled behind,
    num_samples: int  # so many, then those that rate the known token behind them, both in the plan's order
    rated_tokens: torch.Tensor  # these known tokens
    rated_rows: np.ndarray  # and the table rows that they are in

    @classmethod
    def build(cls, plan: ScheduleBatch, tables: RowTables) -> ForwardBatch:
        num_tokens = plan.num_tokens
        before_B = np.cumsum(plan.length) - plan.length
        rows_N = np.repeat(plan.row, plan.length)
        positions_N = np.arange(num_tokens) + np.repeat(plan.start - before_B, plan.length)
        rated_B = plan.start + plan.length - plan.samples - plan.first_logit
        rated_before_B = np.cumsum(rated_B) - rated_B
        first_index_B = before_B + plan.first_logit - plan.start
        rated_indices = np.arange(int(rated_B.sum())) + np.repeat(first_index_B - rated_before_B, rated_B)

        sample_indices = plan.sampled_tokens
        num_samples = len(sample_indices)

        rows, positions, logits = upload(
            tables.slots_RP.device, rows_N, positions_N, np.concatenate([sample_indices, rated_indices])
        )
        rated = logits[num_samples:]
        return cls(
            ids_N=tables.tokens_RP[rows, positions],
            positions_N=positions,
            slots_N=tables.slots_RP[rows, positions].long(),
            num_decode=plan.num_decode,
            plan=plan,
            tables=tables,
            logit_indices=logits,
            num_samples=num_samples,
            rated_tokens=tables.tokens_RP[rows[rated], positions[rated] + 1] if len(rated) else rated,
            rated_rows=rows_N[rated_indices],
        )
