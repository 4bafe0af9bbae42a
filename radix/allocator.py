"""L3, each rank: which pages of the K/V pool are free. Owns the stack of free pages.

Page p is the slots p * page_size .. (p + 1) * page_size - 1. Pages are numbered from 1: page 0 is never handed out, so
that padding has a place to write to. The pool behind this has `num_pages + 1` pages.
"""

from __future__ import annotations

import numpy as np


class TokenToKVPoolAllocator:
    """Hands out whole pages as their slots: from a fresh pool the lowest first, later the last freed first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = num_pages
        slots = np.arange(page_size, (num_pages + 1) * page_size, dtype=np.int32)
        self._stack = slots.reshape(num_pages, page_size)[::-1].copy()

    @property
    def free_tokens(self) -> int:
        return self.free_pages * self.page_size

    @property
    def free_slots(self) -> np.ndarray:
        """int32 [free_tokens], the next to be handed out last."""
        return self._stack[: self.free_pages].reshape(-1)

    def alloc(self, num_pages: int) -> np.ndarray:
        """The slots of `num_pages` pages, int32 [num_pages * page_size]."""
        assert num_pages <= self.free_pages, "more pages than are free"
        top = self.free_pages
        self.free_pages = top - num_pages
        return self._stack[self.free_pages : top][::-1].flatten()

    def free(self, slots: np.ndarray) -> None:
        """Takes whole pages back, given as their slots in order."""
        pages = slots.reshape(-1, self.page_size)
        top = self.free_pages + len(pages)
        self._stack[self.free_pages : top] = pages[::-1]
        self.free_pages = top
