"""L4, each rank: memory of a CPU that a step reads from end to end, in pages of 2 MiB where the system has them.

With pages of 4 KiB a core spends a good part of its time on finding out where the next one is.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE = 2**21
ALIGNMENT = 64  # bytes: a cache line


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], of which no part takes room before it is used."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]


class Arena:
    """Hands out zeroed tensors side by side in large blocks, because most weights are smaller than a huge page."""

    def __init__(self, block: int = 2**26):
        self._block = block
        self._rest = zeros(0)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > len(self._rest):
            self._rest = zeros(max(padded, self._block))
        taken, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return taken.view(dtype).view(shape)
