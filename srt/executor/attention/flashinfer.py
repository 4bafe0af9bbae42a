"""L4, each rank: attention of a GPU over its paged K/V, every kind of rows by the kernel that is fastest for it.

Decode rows go through our own kernel, which reads K/V at nearly the rate of memory; what they share is read once for
all of them by another, if that is worth a launch. Prompt chunks go through the one of FlashInfer (`fa3` on Hopper, else
`fa2`), which is faster still on K/V that lie side by side, so unless a chunk is short and what it sees is long, these
are first brought together, and widened if the cache is narrow.

Shapes: N tokens, H query heads, G key/value heads, C head_dim, T slots; B rows of one kind, L positions they see,
M items of work; S heads of queries, keys and values, F = C / 2; R rows and P positions of the slot table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from srt.executor.attention.cascade import LEAST_ROWS_OF_TILE, Work, cut, most_items, tokens_saved
from srt.executor.attention.flashinfer_kernel import (
    HeadShape,
    Kernel,
    Pages,
    scratch_bytes,
)
from srt.executor.forward_batch import ForwardBatch
from srt.executor.upload import upload
from srt.kernels import cascade, decode_attention, decode_inputs, rope
from srt.kernels.decode_attention import BlockTable, DecodeBlocks, Tiling
from srt.layers.attention import QKNorms
from srt.scheduler.schedule_batch import ScheduleBatch

WORTH_GATHERING = 4
"""Positions seen per query up to which copying them costs less than it gains."""

WORTH_SHARING = 48 << 20
"""Bytes of a layer that need not be read, from which on another launch costs less."""


class Part(Protocol):
    """Neighbouring tokens of a step that go through one kernel."""

    tokens: slice

    def run(self, q_NHC: torch.Tensor, kv_2TGC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        """Of these tokens alone; fills `o_NHC`."""


@dataclass(frozen=True)
class PagedPart:
    tokens: slice
    kernel: Kernel
    info: Any
    q_indptr: torch.Tensor
    pages: Pages

    def run(self, q_NHC: torch.Tensor, kv_2TGC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        self.kernel.run(self.info, q_NHC, kv_2TGC, self.q_indptr, self.pages, o_NHC)


@dataclass(frozen=True)
class GatheredPart:
    tokens: slice
    kernel: Kernel
    info: Any
    q_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    slots_L: torch.Tensor

    def run(self, q_NHC: torch.Tensor, kv_2TGC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        k_LGC, v_LGC = (gathered(each_TGC, self.slots_L, q_NHC.dtype) for each_TGC in kv_2TGC)
        self.kernel.run_beside(self.info, q_NHC, k_LGC, v_LGC, self.q_indptr, self.kv_indptr, o_NHC)


def gathered(kv_TGC: torch.Tensor, slots_L: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of these slots side by side. Torch moves 16 bytes at a time along a first dimension only."""
    if kv_TGC.dtype == dtype:
        return kv_TGC.index_select(0, slots_L)
    return kv_TGC.view(torch.uint8).index_select(0, slots_L).view(kv_TGC.dtype).to(dtype)


@dataclass(frozen=True)
class DecodePart:
    tokens: slice
    blocks: DecodeBlocks

    def run(self, q_NHC: torch.Tensor, kv_2TGC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        decode_attention.attend(q_NHC, kv_2TGC, self.blocks, o_NHC)


@dataclass(frozen=True)
class CascadePart:
    """Decode rows of which some share prefixes."""

    tokens: slice
    blocks: DecodeBlocks  # what they do not share
    rows_B: torch.Tensor
    slots_RP: torch.Tensor
    items_4M: torch.Tensor
    rows_3B: torch.Tensor

    def run(self, q_NHC: torch.Tensor, kv_2TGC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        stretches = cascade.attend(q_NHC, kv_2TGC, self.rows_B, self.slots_RP, self.items_4M, self.rows_3B)
        decode_attention.attend(q_NHC, kv_2TGC, self.blocks, o_NHC, stretches)


class FlashInferBackend:
    def __init__(self, cache: list[torch.Tensor], shape: HeadShape, device: torch.device):
        """`cache` has each layer's keys, then its values, of all slots: [2, T, G, C], finite throughout."""
        self.shape = shape
        self.device = device
        self.cache = cache
        self._scratch = torch.zeros(scratch_bytes(shape, device), dtype=torch.uint8, device=device)
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._prefill = Kernel("fa3" if hopper else "fa2", shape, shape.dtype, self._scratch)
        self._paged_prefill = self._prefill
        if shape.kv_dtype != shape.dtype:
            self._paged_prefill = Kernel("fa2", shape, shape.kv_dtype, self._scratch)
        # Two to each multiprocessor, of all key heads.
        self._wanted_items = 2 * decode_attention.multiprocessors(device) // shape.num_kv_heads

    def plan(self, batch: ForwardBatch) -> StepAttention:
        """Of a batch whose slots are in the tables."""
        plan, slots_RP = batch.plan, batch.tables.slots_RP
        parts: list[Part] = []
        if batch.num_decode:
            parts.append(self._decode_part(plan, slice(0, batch.num_decode), slots_RP))
        if batch.num_decode < plan.num_rows:
            # Each decode row is one token, so chunks begin behind as many tokens as there are decode rows.
            parts.append(self._chunks_part(plan, slice(batch.num_decode, None), slots_RP))
        return StepAttention(self.cache, batch.positions_N, batch.slots_N, parts)

    def work(self, plan: ScheduleBatch) -> Work | None:
        """How the prefixes that its decode rows share are read, if that is worth it."""
        shape = self.shape
        rows_of_tile = cascade.rows_of_tile(shape.num_heads, shape.num_kv_heads)
        if tokens_saved(plan.shared) * shape.slot_bytes < WORTH_SHARING or rows_of_tile < LEAST_ROWS_OF_TILE:
            return None
        return cut(plan.shared, plan.num_decode, rows_of_tile, self._wanted_items, cascade.BLOCK)

    def most_items(self, num_rows: int) -> int:
        """Of the work of so many rows."""
        return most_items(num_rows, self._wanted_items)

    def _decode_part(self, plan: ScheduleBatch, rows: slice, slots_RP: torch.Tensor) -> Part:
        kv_lens_B, work = plan.start[rows] + 1, self.work(plan)
        tiling = Tiling.of(len(kv_lens_B), self.shape.group)
        if work is None:
            rows_B, lengths_B = upload(self.device, plan.row[rows], kv_lens_B)
            table = BlockTable(len(kv_lens_B), int(kv_lens_B.sum()), self.device)
            return DecodePart(rows, table.fill(rows_B, lengths_B, slots_RP, tiling))
        rows_B, lengths_B, items, shares = upload(
            self.device, plan.row[rows], kv_lens_B, work.items_4M.reshape(-1), work.rows_3B.reshape(-1)
        )
        items_4M, rows_3B = items.view(4, -1), shares.view(3, -1)
        table = BlockTable(len(kv_lens_B), int((kv_lens_B - work.rows_3B[0]).sum()), self.device)
        blocks = table.fill(rows_B, lengths_B, slots_RP, tiling, rows_3B[0])
        return CascadePart(rows, blocks, rows_B, slots_RP, items_4M, rows_3B)

    def _chunks_part(self, plan: ScheduleBatch, rows: slice, slots_RP: torch.Tensor) -> Part:
        lengths_B, kv_lens_B = plan.length[rows], plan.start[rows] + plan.length[rows]
        gathers = kv_lens_B.sum() <= WORTH_GATHERING * lengths_B.sum()
        page_size = 1 if gathers else self.shape.page_size
        kernel = self._prefill if gathers else self._paged_prefill
        info = kernel.plan(lengths_B, kv_lens_B, page_size)
        q_indptr = np.concatenate(([0], np.cumsum(lengths_B)))
        row_B, ends_B, q_indptr = upload(self.device, plan.row[rows], kv_lens_B, q_indptr)
        pages = self._pages(row_B, ends_B, kv_lens_B, slots_RP, page_size)
        if gathers:
            return GatheredPart(rows, kernel, info, q_indptr.int(), pages.kv_indptr, pages.kv_indices)
        return PagedPart(rows, kernel, info, q_indptr.int(), pages)

    def _pages(
        self, rows_B: torch.Tensor, ends_B: torch.Tensor, kv_lens_B: np.ndarray, slots_RP: torch.Tensor, page_size: int
    ) -> Pages:
        num_pages = int((-(-kv_lens_B // page_size)).sum())
        pages = Pages.empty(len(kv_lens_B), num_pages, self.device)
        decode_inputs.page_table(rows_B, ends_B, slots_RP, page_size, *pages.tensors)
        return pages


class StepAttention:
    """One step's `FusedAttend`."""

    def __init__(self, cache: list[torch.Tensor], positions_N: torch.Tensor, slots_N: torch.Tensor, parts: list[Part]):
        self._cache = cache
        self._positions_N = positions_N
        self._slots_N = slots_N
        self._parts = parts

    def __call__(
        self, layer: int, qkv_NSC: torch.Tensor, turns_P2F: torch.Tensor, norms: QKNorms | None
    ) -> torch.Tensor:
        q_NHC = rope.rotate_and_store(
            qkv_NSC,
            turns_P2F,
            self._positions_N,
            self._slots_N,
            self._cache[layer],
            *(norms or (None, None, 0.0)),
        )
        o_NHC = torch.empty_like(q_NHC)
        self.attend(layer, q_NHC, o_NHC)
        return o_NHC

    def attend(self, layer: int, q_NHC: torch.Tensor, o_NHC: torch.Tensor) -> None:
        """The rest of it, once queries are rotated and K/V stored."""
        kv_2TGC = self._cache[layer]
        for part in self._parts:
            part.run(q_NHC[part.tokens], kv_2TGC, o_NHC[part.tokens])
