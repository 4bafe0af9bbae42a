"""L4, each rank: attention of decode rows over prefixes that they share, each read once for all its rows.

Rows of a group, with all their query heads that share a key head, fill the tiles of one product; a tile and a stretch
of the prefix are an item of work. What comes of a tile's items is joined with what comes of each row's own positions,
in `decode_attention.py`, by their softmax sums (Juravsky et al. 2024, "Hydragen"). Items are read on the GPU, so that a
CUDA graph with room for enough of them holds any groups.

Shapes: B rows, H query heads, G key/value heads, Q = H / G, C head_dim, M items, N queries of a tile, R table rows, P
positions, T slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow
from srt.kernels.running_softmax import take_in

QUERIES = 64
"""Of a tile: as many as one of Hopper's products takes at least."""

BLOCK = 64
"""Positions of a step."""


class Stretches(NamedTuple):
    """What came of each item: sums of values weighted by exp2(score - highest), float32, and [highest, total]."""

    value_MGNC: torch.Tensor
    sums_2MGN: torch.Tensor
    items_4M: torch.Tensor
    rows_3B: torch.Tensor


def rows_of_tile(num_heads: int, num_kv_heads: int) -> int:
    return QUERIES // (num_heads // num_kv_heads)


def attend(
    q_BHC: torch.Tensor,
    kv_layer: torch.Tensor,
    rows_B: torch.Tensor,
    slots_RP: torch.Tensor,
    items_4M: torch.Tensor,
    rows_3B: torch.Tensor,
) -> Stretches:
    """Each item's rows over its positions, whose slots the first of these rows has in the slot table.

    An item is its first row in the batch, the number of rows, at most `rows_of_tile`, its first position and the one
    behind its last; one with no rows is padding and gives no numbers. `rows_3B` holds how many positions a row shares,
    which is for others to read, the first of its items, and their number. `kv_layer` is [2, T, G, C]; scores are scaled
    by 1 / sqrt(C).
    """
    num_heads, head_dim = q_BHC.shape[1:]
    num_items, num_kv_heads = items_4M.shape[1], kv_layer.shape[2]
    group = num_heads // num_kv_heads
    assert q_BHC.is_contiguous()
    assert items_4M.is_contiguous()
    assert rows_3B.is_contiguous()
    assert kv_layer.stride(3) == 1
    assert slots_RP.stride(1) == 1
    assert head_dim == triton.next_power_of_2(head_dim)
    value_MGNC = q_BHC.new_empty((num_items, num_kv_heads, QUERIES, head_dim), dtype=torch.float32)
    sums_2MGN = q_BHC.new_empty((2, num_items, num_kv_heads, QUERIES), dtype=torch.float32)
    _attend_to_item[(num_kv_heads, num_items)](
        q_BHC,
        kv_layer,
        rows_B,
        items_4M,
        slots_RP,
        value_MGNC,
        sums_2MGN,
        slots_RP.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        head_dim**-0.5 * 1.4426950408889634,
        num_items,
        G=num_kv_heads,
        Q=group,
        C=head_dim,
        N=QUERIES,
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=3,
        **LAUNCH,
    )
    return Stretches(value_MGNC, sums_2MGN, items_4M, rows_3B)


@triton.jit(do_not_specialize=["rows", "items", "num_items"])
def _attend_to_item(
    q,
    kv,
    rows,
    items,
    slots,
    value_out,
    sums_out,
    slots_stride,
    kv_stride_kind,
    kv_stride_slot,
    kv_stride_head,
    scale,
    num_items,
    G: tl.constexpr,
    Q: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    item = tl.program_id(1)
    n = tl.arange(0, N)
    c = tl.arange(0, C)
    follow()
    num_rows = tl.load(items + num_items + item).to(tl.int32)
    if num_rows > 0:
        first_row = tl.load(items + item)
        begin = tl.load(items + 2 * num_items + item).to(tl.int32)
        end = tl.load(items + 3 * num_items + item).to(tl.int32)
        line = slots + tl.load(rows + first_row).to(tl.int64) * slots_stride
        query_at = ((first_row + n // Q) * G + g) * Q + n % Q
        asks = n < num_rows * Q
        query = tl.load(q + query_at[:, None] * C + c[None, :], mask=asks[:, None], other=0.0)
        best = tl.full((N,), float("-inf"), tl.float32)
        total = tl.zeros((N,), tl.float32)
        value = tl.zeros((N, C), tl.float32)
        for first in range(begin, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            inside = position < end
            slot = tl.load(line + position, mask=inside, other=0).to(tl.int64)
            place = kv + slot[:, None] * kv_stride_slot + g * kv_stride_head + c[None, :]
            k = tl.load(place, mask=inside[:, None], other=0.0).to(q.dtype.element_ty)
            v = tl.load(place + kv_stride_kind, mask=inside[:, None], other=0.0).to(q.dtype.element_ty)
            best, total, value = take_in(best, total, value, query, k, v, inside, scale)
        index = (item * G + g) * N + n
        tl.store(value_out + index[:, None].to(tl.int64) * C + c[None, :], value, mask=asks[:, None])
        tl.store(sums_out + index, best, mask=asks)
        tl.store(sums_out + num_items * G * N + index, total, mask=asks)
