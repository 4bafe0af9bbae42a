"""L4, each rank: one of FlashInfer's attention kernels, planned on the host once a step and run once a layer.

FlashInfer's own wrappers have one pinned workspace each, which the next plan may overwrite before the copy of the last
one has run, and they copy to the device what our kernels have there already; so this calls what is behind them.

Shapes: N tokens, H query heads, G key/value heads, C head_dim, T slots, B rows, L positions side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import get_batch_prefill_module

INT_WORKSPACE = 8 << 20
LEAST_FLOAT_WORKSPACE = 128 << 20
MOST_QUERIES = 128
"""That a block takes at a time."""
CAUSAL = 1
NHD = 0
NO_VARIANT = (None,) * 6
"""Masks, slopes and lengths of what else the kernels can do."""
NO_SCALES = (None,) * 3


@dataclass(frozen=True)
class HeadShape:
    """Of one rank's attention, and the cache it reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype  # the same, or narrower

    @property
    def slot_bytes(self) -> int:
        """Of a layer's K/V."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Pages:
    """Where the K/V of B rows lies, int32 on the device, as FlashInfer takes it."""

    kv_indptr: torch.Tensor  # [B + 1]
    kv_indices: torch.Tensor  # at least kv_indptr[B] page numbers
    last_page_len: torch.Tensor  # [B]

    @classmethod
    def empty(cls, num_rows: int, num_pages: int, device: torch.device) -> Pages:
        sizes = (num_rows + 1, num_pages, num_rows)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_indptr, self.kv_indices, self.last_page_len


class Kernel:
    """One of FlashInfer's kernels for one shape of heads, and the memory that its schedules live in."""

    def __init__(
        self,
        backend: str,
        shape: HeadShape,
        kv_dtype: torch.dtype,
        scratch: torch.Tensor,
    ):
        """Only `fa2` reads K/V that are narrower than the queries."""
        self._backend = backend
        self._shape = shape
        self._scratch = scratch
        dtype, head_dim = shape.dtype, shape.head_dim
        self._module = get_batch_prefill_module(
            backend, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
        )
        self._schedule = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=scratch.device)
        # `plan` writes its schedule here and copies it without waiting, so the next one needs other memory until that
        # copy is done.
        self._staged = [torch.zeros(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self._overlaps = torch.cuda.get_device_capability(scratch.device) >= (9, 0)

    def plan(
        self,
        lengths_B: np.ndarray,
        kv_lens_B: np.ndarray,
        page_size: int,
    ) -> Any:
        """The schedule of rows with `lengths_B` queries, the last of which sees all of `kv_lens_B` positions."""
        shape = self._shape
        num_rows = len(kv_lens_B)
        self._staged.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        indptrs = np.zeros((2, num_rows + 1), np.int32)
        np.cumsum(lengths_B, out=indptrs[0, 1:])
        np.cumsum(-(-kv_lens_B // page_size), out=indptrs[1, 1:])
        q_indptr, kv_indptr = torch.from_numpy(indptrs)
        options = (-1, False, 0) if self._backend == "fa2" else ()
        info = self._module.plan(
            self._scratch,
            self._schedule,
            self._staged[0],
            q_indptr,
            kv_indptr,
            torch.from_numpy(kv_lens_B.astype(np.int32)),
            int(indptrs[0, -1]),
            num_rows,
            shape.num_heads,
            shape.num_kv_heads,
            page_size,
            False,  # not for a CUDA graph
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            -1,
            *options,
        )
        self._copied[0].record()
        return info

    def run(
        self,
        info: Any,
        q_NHC: torch.Tensor,
        kv_2TGC: torch.Tensor,
        q_indptr: torch.Tensor,
        pages: Pages,
        o_NHC: torch.Tensor,
    ) -> None:
        """Causal, over pages."""
        shape = self._shape
        k, v = kv_2TGC.view(2, -1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._module.paged_run(
            self._scratch,
            self._schedule,
            info,
            q_NHC,
            k,
            v,
            q_indptr,
            pages.kv_indptr,
            pages.kv_indices,
            pages.last_page_len,
            o_NHC,
            None,
            CAUSAL,
            NHD,
            -1,
            self._overlaps,
            *NO_VARIANT,
            0.0,
            shape.head_dim**-0.5,
            *NO_SCALES,
            1.0,
            1e4,
            0,
            self._scratch.numel(),
        )

    def run_beside(
        self,
        info: Any,
        q_NHC: torch.Tensor,
        k_LGC: torch.Tensor,
        v_LGC: torch.Tensor,
        q_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        o_NHC: torch.Tensor,
    ) -> None:
        """Causal, over the L positions of all rows side by side instead of pages; planned with a page size of 1."""
        self._module.ragged_run(
            self._scratch,
            self._schedule,
            info,
            q_NHC,
            k_LGC,
            v_LGC,
            q_indptr,
            kv_indptr,
            o_NHC,
            None,
            CAUSAL,
            NHD,
            -1,
            self._overlaps,
            *NO_VARIANT,
            0.0,
            self._shape.head_dim**-0.5,
            1.0,
            1e4,
            0,
        )


def scratch_bytes(shape: HeadShape, device: torch.device) -> int:
    """For the partial results of chunks whose K/V is split, in float32; FlashInfer's own bound.

    It splits them only while each K/V head has no more blocks than two to each multiprocessor.
    """
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count // shape.num_kv_heads
    return max(LEAST_FLOAT_WORKSPACE, shape.num_heads * blocks * MOST_QUERIES * (shape.head_dim + 1) * 4)
