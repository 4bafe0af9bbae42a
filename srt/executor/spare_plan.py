"""L4, each rank: plans of work that nobody asked for, to compile, to capture and to measure."""

from __future__ import annotations

import numpy as np

from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch, TokenMasks


def plan_of_spare_slots(num_rows: int, num_decode: int, length: int, wish: SamplingParams) -> ScheduleBatch:
    """Prompts of `length` tokens each, all on the spare page."""
    row = np.arange(num_rows, dtype=np.int32)
    lengths = np.where(row < num_decode, 1, length).astype(np.int32)
    start = np.zeros(num_rows, np.int32)
    return ScheduleBatch(
        step=0,
        opened=tuple(OpenedRow(i, np.zeros(length, np.int32), length, wish, ()) for i in range(num_rows)),
        num_decode=num_decode,
        row=row,
        start=start,
        length=lengths,
        first_logit=lengths - 1,
        samples=np.ones(num_rows, np.int32),
        table_start=start,
        slots=np.zeros(int(lengths.sum()), np.int32),
    )


def no_masks(num_rows: int, num_tokens: int) -> TokenMasks:
    """For that many rows, which may all draw every token."""
    return TokenMasks(np.arange(num_rows, dtype=np.int32), np.full((num_rows, -(-num_tokens // 32)), -1, np.int32))
