"""L4, each rank: what the executor knows of each row, kept between steps: its slots and its tokens.

Shapes: R rows, P positions (context), B rows of a batch, S tokens that it samples.
"""

from __future__ import annotations

import numpy as np
import torch

from srt.executor.upload import upload
from srt.scheduler.schedule_batch import ScheduleBatch


class RowTables:
    """`slots_RP` and `tokens_RP` are int32: with long contexts they take room. Nothing else writes to them."""

    def __init__(self, num_rows: int, context_length: int, device: torch.device):
        self.slots_RP = torch.zeros((num_rows, context_length), dtype=torch.int32, device=device)
        # One more column: an overrun step may sample behind the context's last position.
        self.tokens_RP = torch.zeros((num_rows, context_length + 1), dtype=torch.int32, device=device)

    def apply(self, batch: ScheduleBatch) -> None:
        """Brings the tables to what this plan assumes; called when the step executes, not when it is launched."""
        for opened in batch.opened:
            (tokens,) = upload(self.tokens_RP.device, opened.tokens)
            self.tokens_RP[opened.row, : len(tokens)] = tokens
        if len(batch.slots):
            self._write_slots(batch)
        if batch.draft.size:
            rows, positions, tokens = upload(self.tokens_RP.device, *batch.draft)
            self.tokens_RP[rows, positions] = tokens.int()

    def _write_slots(self, batch: ScheduleBatch) -> None:
        counts_B = batch.start + batch.length - batch.table_start
        rows = np.repeat(batch.row, counts_B)
        before_B = np.cumsum(counts_B) - counts_B
        positions = np.arange(len(batch.slots)) + np.repeat(batch.table_start - before_B, counts_B)
        rows_, positions_, slots_ = upload(self.slots_RP.device, rows, positions, batch.slots)
        self.slots_RP[rows_, positions_] = slots_.int()

    def write_tokens(self, batch: ScheduleBatch, tokens_S: torch.Tensor) -> None:
        """Each sampled token enters behind the position it was sampled at, over what a draft had there."""
        rows_S, positions_S = upload(self.tokens_RP.device, batch.sampled_rows, batch.sampled_positions)
        self.tokens_RP[rows_S, positions_S] = tokens_S.int()
