"""L3, each rank: which slots the tokens of a running request live in. Owns the slot table and its free rows."""

from __future__ import annotations

import numpy as np


class ReqToTokenPool:
    """`table[row, position]` is the slot of a token; entries behind a row's `allocated` mean nothing."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.table = np.zeros((num_rows, width), np.int32)
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def alloc(self) -> int:
        return self.free_rows.pop()

    def free(self, row: int) -> None:
        self.free_rows.append(row)
