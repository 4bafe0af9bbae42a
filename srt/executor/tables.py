"""L4, each rank: what the executor knows of each row, kept between steps: its slots and its tokens.

Shapes: R rows, P positions (context), B rows of a batch.
"""

from __future__ import annotations

import numpy as np
import torch

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
            tokens = torch.from_numpy(opened.tokens.astype(np.int32))
            self.tokens_RP[opened.row, : len(tokens)] = tokens.to(self.tokens_RP.device)
        if len(batch.slots):
            self._write_slots(batch)

    def _write_slots(self, batch: ScheduleBatch) -> None:
        counts_B = batch.start + batch.length - batch.table_start
        rows = np.repeat(batch.row, counts_B)
        before_B = np.cumsum(counts_B) - counts_B
        positions = np.arange(len(batch.slots)) + np.repeat(batch.table_start - before_B, counts_B)
        packed = np.stack((rows, positions, batch.slots)).astype(np.int64)
        rows_, positions_, slots_ = torch.from_numpy(packed).to(self.slots_RP.device)
        self.slots_RP[rows_, positions_] = slots_.int()

    def write_tokens(self, batch: ScheduleBatch, tokens_S: torch.Tensor) -> None:
        """Each sampled token enters behind its row's last position."""
        places = np.stack((batch.row, batch.start + batch.length))[:, batch.samples].astype(np.int64)
        rows_S, positions_S = torch.from_numpy(places).to(self.tokens_RP.device)
        self.tokens_RP[rows_S, positions_S] = tokens_S.int()
