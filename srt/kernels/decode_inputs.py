"""L4, each rank: what a decode step reads, gathered on the GPU from the rows' tables so that a CUDA graph can hold it.

Shapes: R table rows, P positions, B rows of a step (one token each), M entries of the page list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

ROWS = 128
PAGES = 512
PROGRAMS = 8
"""Per row, whatever its length: a graph's grid is fixed, so programs walk over the row's pages."""

ANY = ["num_rows", "rows", "lengths"]
"""Arguments that no variant is compiled for: rows come in any number and from anywhere in a longer tensor."""


def gather(
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_RP: torch.Tensor,
    slots_RP: torch.Tensor,
    ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    slots_B: torch.Tensor,
) -> None:
    """Fills the last three: each row's newest token, its position `lengths - 1`, and the slot of its K/V.

    A row of length 0 is padding: token, position and slot 0, the spare one.
    """
    num_rows = len(rows_B)
    _gather[(triton.cdiv(num_rows, ROWS),)](
        rows_B,
        lengths_B,
        tokens_RP,
        slots_RP,
        ids_B,
        positions_B,
        slots_B,
        num_rows,
        tokens_RP.stride(0),
        slots_RP.stride(0),
        BLOCK=ROWS,
        num_warps=4,
        **LAUNCH,
    )


def page_table(
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_RP: torch.Tensor,
    page_size: int,
    kv_indptr: torch.Tensor,
    kv_indices_M: torch.Tensor,
    last_page_len_B: torch.Tensor,
) -> None:
    """Fills the last three, [B + 1], [≥ pages of all rows] and [B] in int32: the rows' pages one after the other.

    A row of length L has ceil(L / page_size) pages, and (L - 1) % page_size + 1 tokens on the last of them. A row of
    length 0 has none; its last page's length is given as 0.
    """
    num_rows = len(rows_B)
    _page_table[(num_rows, PROGRAMS)](
        rows_B,
        lengths_B,
        slots_RP,
        kv_indptr,
        kv_indices_M,
        last_page_len_B,
        num_rows,
        slots_RP.stride(0),
        PAGE_SIZE=page_size,
        PROGRAMS=PROGRAMS,
        BLOCK_B=ROWS,
        BLOCK=PAGES,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit(do_not_specialize=[*ANY, "ids_out", "positions_out", "slots_out"])
def _gather(
    rows,
    lengths,
    tokens,
    slots,
    ids_out,
    positions_out,
    slots_out,
    num_rows,
    tokens_stride,
    slots_stride,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    follow()
    length = tl.load(lengths + b, mask=inside, other=0).to(tl.int64)
    row = tl.load(rows + b, mask=inside, other=0).to(tl.int64)
    used = length > 0
    position = tl.where(used, length - 1, 0)
    token = tl.load(tokens + row * tokens_stride + position, mask=used, other=0)
    slot = tl.load(slots + row * slots_stride + position, mask=used, other=0)
    tl.store(ids_out + b, token.to(ids_out.dtype.element_ty), mask=inside)
    tl.store(positions_out + b, position.to(positions_out.dtype.element_ty), mask=inside)
    tl.store(slots_out + b, slot.to(slots_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*ANY, "indptr", "indices", "last_page_len"])
def _page_table(
    rows,
    lengths,
    slots,
    indptr,
    indices,
    last_page_len,
    num_rows,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    part = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    follow()
    before = tl.zeros((BLOCK_B,), tl.int32)
    first = 0
    while first < index:
        other = tl.load(lengths + first + b, mask=first + b < index, other=0).to(tl.int32)
        before += (other + PAGE_SIZE - 1) // PAGE_SIZE
        first += BLOCK_B
    begin = tl.sum(before, axis=0)
    length = tl.load(lengths + index).to(tl.int32)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if part == 0:
        tl.store(indptr + index, begin)
        tl.store(last_page_len + index, length - tl.maximum(pages - 1, 0) * PAGE_SIZE)
        if index == num_rows - 1:
            tl.store(indptr + num_rows, begin + pages)
    row = slots + tl.load(rows + index).to(tl.int64) * slots_stride
    page = part * BLOCK + tl.arange(0, BLOCK)
    first = part * BLOCK
    while first < pages:
        slot = tl.load(row + page * PAGE_SIZE, mask=page < pages, other=0)
        tl.store(indices + begin + page, slot // PAGE_SIZE, mask=page < pages)
        page += PROGRAMS * BLOCK
        first += PROGRAMS * BLOCK
