"""L4, each rank: attention of a few decode rows, whose K/V many programs read at once, in two short launches.

Each row's positions are cut into parts; a program computes one part for the query heads that share a key head, and a
second launch joins the parts by their softmax sums (Dao et al. 2023, "Flash-Decoding"). Lengths are read on the GPU, so
nothing is planned on the host and a CUDA graph holds any lengths.

Shapes: B rows, H query heads, G key/value heads, Q = H / G, C head_dim, K parts, R table rows, P positions, T slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import COMPILED, LAUNCH, follow

MOST_ROWS = MOST_HEADS = 16

BLOCK = 64
"""Positions of a step."""

PROGRAMS = 1024
MOST_PARTS = 64


def wins(num_rows: int, num_heads: int) -> bool:
    """Whether this is faster than FlashInfer's two launches and their plan, as measured on an H200 at 1,024 positions.

    With Qwen3-0.6B's 16 query heads it is at 1, 4 and 16 rows and not at 32; with Llama-3.1-8B's 32 it is not at 1.
    """
    return num_rows <= MOST_ROWS and num_heads <= MOST_HEADS


def attend(
    q_BHC: torch.Tensor,
    kv_layer: torch.Tensor,
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_RP: torch.Tensor,
    o_BHC: torch.Tensor,
) -> None:
    """Fills `o_BHC`: each row's query over its first `lengths` positions, whose slots are in the slot table.

    `kv_layer` is [2, T, G, C]; scores are scaled by 1 / sqrt(C). Sums are float32; a row of length 0 gives no numbers.
    """
    num_rows, num_heads, head_dim = q_BHC.shape
    num_kv_heads = kv_layer.shape[2]
    assert q_BHC.is_contiguous()
    assert o_BHC.is_contiguous()
    assert kv_layer.stride(3) == 1
    assert slots_RP.stride(1) == 1
    assert head_dim == triton.next_power_of_2(head_dim)
    parts = min(triton.next_power_of_2(max(PROGRAMS // (num_rows * num_kv_heads), 1)), MOST_PARTS)
    part_BHKC = torch.empty((num_rows, num_heads, parts, head_dim), dtype=torch.float32, device=q_BHC.device)
    sums_2BHK = torch.empty((2, num_rows, num_heads, parts), dtype=torch.float32, device=q_BHC.device)
    group = num_heads // num_kv_heads
    _attend_to_part[(parts, num_kv_heads, num_rows)](
        q_BHC,
        kv_layer,
        rows_B,
        lengths_B,
        slots_RP,
        part_BHKC,
        sums_2BHK,
        slots_RP.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        head_dim**-0.5 * 1.4426950408889634,
        num_rows,
        H=num_heads,
        Q=group,
        C=head_dim,
        PARTS=parts,
        BLOCK_Q=max(triton.next_power_of_2(group), 16),
        BLOCK=BLOCK,
        num_warps=4,
        **LAUNCH,
    )
    _join_parts[(num_heads, num_rows)](
        part_BHKC,
        sums_2BHK,
        lengths_B,
        o_BHC,
        num_rows,
        H=num_heads,
        C=head_dim,
        PARTS=parts,
        BLOCK=BLOCK,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit
def span_of(length, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of a part, whole steps."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, PARTS), BLOCK), 1) * BLOCK


@triton.jit(do_not_specialize=["rows", "lengths", "num_rows"])
def _attend_to_part(
    q,
    kv,
    rows,
    lengths,
    slots,
    part_out,
    sums_out,
    slots_stride,
    kv_stride_kind,
    kv_stride_slot,
    kv_stride_head,
    scale,
    num_rows,
    H: tl.constexpr,
    Q: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2)
    h = tl.arange(0, BLOCK_Q)
    c = tl.arange(0, C)
    follow()
    length = tl.load(lengths + b).to(tl.int32)
    span = span_of(length, PARTS, BLOCK)
    begin = part * span
    if begin < length:
        end = tl.minimum(begin + span, length)
        row = slots + tl.load(rows + b).to(tl.int64) * slots_stride
        head = b * H + g * Q + h
        query = tl.load(q + head[:, None] * C + c[None, :], mask=(h < Q)[:, None], other=0.0)
        best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        value = tl.zeros((BLOCK_Q, C), tl.float32)
        for first in range(begin, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            inside = position < end
            slot = tl.load(row + position, mask=inside, other=0).to(tl.int64)
            place = kv + slot[:, None] * kv_stride_slot + g * kv_stride_head + c[None, :]
            k = tl.load(place, mask=inside[:, None], other=0.0)
            v = tl.load(place + kv_stride_kind, mask=inside[:, None], other=0.0)
            if not COMPILED:  # the interpreter cannot multiply bfloat16
                query, k, v = query.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            score = tl.where(inside[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            highest = tl.maximum(best, tl.max(score, axis=1))
            weight = tl.exp2(score - highest[:, None])
            fade = tl.exp2(best - highest)
            total = total * fade + tl.sum(weight, axis=1)
            value = value * fade[:, None] + tl.dot(weight.to(v.dtype), v)
            best = highest
        index = head * PARTS + part
        tl.store(part_out + index[:, None].to(tl.int64) * C + c[None, :], value, mask=(h < Q)[:, None])
        tl.store(sums_out + index, best, mask=h < Q)
        tl.store(sums_out + num_rows * H * PARTS + index, total, mask=h < Q)


@triton.jit(do_not_specialize=["lengths", "num_rows"])
def _join_parts(
    part,
    sums,
    lengths,
    o,
    num_rows,
    H: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1)
    head = b * H + tl.program_id(0)
    k = tl.arange(0, PARTS)
    c = tl.arange(0, C)
    follow()
    length = tl.load(lengths + b).to(tl.int32)
    used = k * span_of(length, PARTS, BLOCK) < length
    index = head * PARTS + k
    best = tl.load(sums + index, mask=used, other=float("-inf"))
    total = tl.load(sums + num_rows * H * PARTS + index, mask=used, other=0.0)
    value = tl.load(part + index[:, None].to(tl.int64) * C + c[None, :], mask=used[:, None], other=0.0)
    weight = tl.where(used, tl.exp2(best - tl.max(best, axis=0)), 0.0)
    result = tl.sum(value * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(o + head * C + c, result.to(o.dtype.element_ty))
