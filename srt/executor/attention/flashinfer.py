"""L4, each rank: attention by FlashInfer's kernels over the paged K/V of a GPU.

Decode rows go through the kernel that splits a row's K/V over many blocks (`fa2`, with tensor cores: they read K/V
fastest where several query heads share them), prompt chunks through the one for many queries (`fa3` on Hopper, else
`fa2`). Both need a schedule, made on the host once a step from lengths alone, and then run once a layer.

Shapes: N tokens, H query heads, G key/value heads, C head_dim, T slots; B rows of one kind, R decode rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import get_batch_prefill_module

from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import SplitKVCache
from srt.executor.upload import upload
from srt.kernels import decode_inputs, rope
from srt.layers.attention import QKNorms
from srt.scheduler.schedule_batch import ScheduleBatch

INT_WORKSPACE = 8 << 20
LEAST_FLOAT_WORKSPACE = 128 << 20
NO_MASK, CAUSAL = 0, 1
NHD = 0


@dataclass(frozen=True)
class HeadShape:
    """Of one rank's attention, and the cache it reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

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

    def of(self, num_rows: int) -> Pages:
        """The same memory for fewer rows."""
        return Pages(self.kv_indptr[: num_rows + 1], self.kv_indices, self.last_page_len[:num_rows])


class Kernel:
    """One of FlashInfer's kernels for one shape of heads, and the memory that its schedules live in."""

    def __init__(self, backend: str, shape: HeadShape, scratch: torch.Tensor, int_workspace: int = INT_WORKSPACE):
        self._backend = backend
        self._shape = shape
        self._scratch = scratch
        dtype, head_dim = shape.dtype, shape.head_dim
        self._module = get_batch_prefill_module(
            backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
        )
        self._schedule = torch.empty(int_workspace, dtype=torch.uint8, device=scratch.device)
        # `plan` writes its schedule here and copies it without waiting, so the next one needs other memory until that
        # copy is done.
        self._staged = [torch.zeros(int_workspace, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self._overlaps = torch.cuda.get_device_capability(scratch.device) >= (9, 0)

    def plan(
        self,
        lengths_B: np.ndarray,
        kv_lens_B: np.ndarray,
        *,
        causal: bool,
        fixed_grid: bool = False,
        split: bool = True,
    ) -> Any:
        """The schedule of rows with `lengths_B` queries that see `kv_lens_B` positions, for `run`.

        With `fixed_grid` all schedules of as many rows launch the same blocks, so that a CUDA graph may hold the run.
        """
        shape = self._shape
        num_rows = len(kv_lens_B)
        self._staged.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        indptrs = np.zeros((2, num_rows + 1), np.int32)
        np.cumsum(lengths_B, out=indptrs[0, 1:])
        np.cumsum(-(-kv_lens_B // shape.page_size), out=indptrs[1, 1:])
        q_indptr, kv_indptr = torch.from_numpy(indptrs)
        options = (-1, not split, 0) if self._backend == "fa2" else ()
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
            shape.page_size,
            fixed_grid,
            shape.head_dim,
            shape.head_dim,
            causal,
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
        *,
        causal: bool,
    ) -> None:
        shape = self._shape
        k, v = kv_2TGC.view(2, -1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        nothing = (None,) * 6  # masks, slopes and lengths of the variants we do not use
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
            CAUSAL if causal else NO_MASK,
            NHD,
            -1,
            self._overlaps,
            *nothing,
            0.0,
            shape.head_dim**-0.5,
            None,
            None,
            None,
            1.0,
            1e4,
            0,
            self._scratch.numel(),
        )


class FlashInferBackend:
    def __init__(self, cache: SplitKVCache, shape: HeadShape, most_rows: int, device: torch.device):
        self.shape = shape
        self.device = device
        self._cache = cache
        self._scratch = torch.zeros(scratch_bytes(shape, most_rows, device), dtype=torch.uint8, device=device)
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self.decode = self.kernel("fa2")
        self._prefill = self.kernel("fa3" if hopper else "fa2")
        self._ones = torch.arange(most_rows + 1, dtype=torch.int32, device=device)

    def kernel(self, backend: str, int_workspace: int = INT_WORKSPACE) -> Kernel:
        return Kernel(backend, self.shape, self._scratch, int_workspace)

    def one_query_each(self, num_rows: int) -> torch.Tensor:
        """The query index of decode rows."""
        return self._ones[: num_rows + 1]

    def plan(self, batch: ForwardBatch) -> StepAttention:
        """Of a batch whose slots are in the tables."""
        slots_RP = batch.tables.slots_RP
        decode, chunks = slice(0, batch.num_decode), slice(batch.num_decode, None)
        parts = [
            self._part(kernel, batch.plan, rows, slots_RP, causal)
            for kernel, rows, causal in ((self.decode, decode, False), (self._prefill, chunks, True))
            if len(batch.plan.row[rows])
        ]
        return StepAttention(self._cache, batch.positions_N, batch.slots_N, parts)

    def of_decode(
        self, kernel: Kernel, info: Any, positions_R: torch.Tensor, slots_R: torch.Tensor, pages: Pages
    ) -> StepAttention:
        """Of decode rows alone, in memory that a CUDA graph knows."""
        part = Part(kernel, info, slice(None), self.one_query_each(len(positions_R)), pages, causal=False)
        return StepAttention(self._cache, positions_R, slots_R, [part])

    def _part(self, kernel: Kernel, plan: ScheduleBatch, rows: slice, slots_RP: torch.Tensor, causal: bool) -> Part:
        row_B, lengths_B = plan.row[rows], plan.length[rows]
        kv_lens_B = plan.start[rows] + lengths_B
        info = kernel.plan(lengths_B, kv_lens_B, causal=causal)
        q_indptr = np.concatenate(([0], np.cumsum(lengths_B)))
        on_device = upload(self.device, row_B, kv_lens_B, q_indptr)
        num_pages = int((-(-kv_lens_B // self.shape.page_size)).sum())
        pages = Pages.empty(len(row_B), num_pages, self.device)
        self.fill(pages, on_device[0], on_device[1], slots_RP)
        # Decode rows come first, so chunks begin behind as many tokens as there are decode rows.
        return Part(kernel, info, rows, on_device[2].int(), pages, causal)

    def fill(self, pages: Pages, rows_B: torch.Tensor, kv_lens_B: torch.Tensor, slots_RP: torch.Tensor) -> None:
        decode_inputs.page_table(
            rows_B,
            kv_lens_B,
            slots_RP,
            self.shape.page_size,
            pages.kv_indptr,
            pages.kv_indices,
            pages.last_page_len,
        )


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens of a step that go through one kernel."""

    kernel: Kernel
    info: Any
    tokens: slice
    q_indptr: torch.Tensor
    pages: Pages
    causal: bool


class StepAttention:
    """One step's `FusedAttend`."""

    def __init__(self, cache: SplitKVCache, positions_N: torch.Tensor, slots_N: torch.Tensor, parts: list[Part]):
        self._cache = cache
        self._positions_N = positions_N
        self._slots_N = slots_N
        self._parts = parts

    def __call__(
        self, layer: int, qkv_NSC: torch.Tensor, turns_P2F: torch.Tensor, norms: QKNorms | None
    ) -> torch.Tensor:
        kv_2TGC = self._cache.layer(layer)
        q_NHC = rope.rotate_and_store(
            qkv_NSC, turns_P2F, self._positions_N, self._slots_N, kv_2TGC, *(norms or (None, None, 0.0))
        )
        o_NHC = torch.empty_like(q_NHC)
        for part in self._parts:
            part.kernel.run(
                part.info,
                q_NHC[part.tokens],
                kv_2TGC,
                part.q_indptr,
                part.pages,
                o_NHC[part.tokens],
                causal=part.causal,
            )
        return o_NHC


def splits(shape: HeadShape, device: torch.device) -> int:
    """Up to this many blocks per K/V head the decode kernel spreads its rows over: two to each multiprocessor."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count // shape.num_kv_heads


def scratch_bytes(shape: HeadShape, most_rows: int, device: torch.device) -> int:
    """For the partial results of rows whose K/V is split; FlashInfer's own bound for decode rows, in float32."""
    tile = 16 if shape.group <= 16 else 64  # queries that a block takes at a time
    tiles = -(-most_rows * shape.group // tile) + most_rows - 1
    blocks = max(splits(shape, device), tiles)
    return max(LEAST_FLOAT_WORKSPACE, shape.num_heads * blocks * tile * (shape.head_dim + 1) * 4)
