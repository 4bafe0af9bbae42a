"""L3, each rank: which pages of the K/V pool are free. Owns the stack of free pages.

Page p is the slots p * page_size .. (p + 1) * page_size - 1. Pages are numbered from 1: page 0 is never handed out, so
that padding has a place to write to. The pool behind this has `num_pages + 1` pages.
"""

from __future__ import annotations

import numpy as np


class TokenToKVPoolAllocator:
    """Hands out pages as runs of slots, lowest numbers first from a fresh pool, else the last freed first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def free_tokens(self) -> int:
        return self.free_pages * self.page_size

    @property
    def pages(self) -> np.ndarray:
        """The free pages, int32, next to be handed out last. A view."""
        return self._stack[: self.free_pages]

    def alloc(self, num_pages: int) -> np.ndarray:
        """Slots of `num_pages` pages, int32 [num_pages * page_size]."""
        assert num_pages <= self.free_pages, "more pages than are free"
        top = self.free_pages
        self.free_pages = top - num_pages
        pages = self._stack[self.free_pages : top][::-1]
        return (pages[:, None] * self.page_size + self._offsets).ravel()

    def free(self, slots: np.ndarray) -> None:
        """Takes whole pages back, given as all their slots in order."""
        pages = slots[:: self.page_size] // self.page_size
        top = self.free_pages + len(pages)
        self._stack[self.free_pages : top] = pages[::-1]
        self.free_pages = top
