"""L4, each rank: attention of decode rows over their K/V, which it reads at nearly the rate of memory.

The positions of all rows are cut into blocks, which are laid one behind the other and shared out evenly among as many
programs as the GPU holds. So whatever the rows' lengths are, all programs end together. A program keeps the running
softmax of the row it is in; what it has of a row, all or part, it puts down when the row or its share ends, and a
second launch joins the parts (Dao et al. 2023, "Flash-Decoding"). Lengths are read on the GPU: nothing is planned on
the host, and a CUDA graph holds any lengths.

Shapes: B rows, H query heads, G key/value heads, Q = H / G, C head_dim, R table rows, P positions, T slots, M blocks,
L positions of a block, K parts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from srt.kernels.cascade import QUERIES, Stretches
from srt.kernels.launch import INTERPRETED, LAUNCH, follow
from srt.kernels.running_softmax import take_in

FILLERS = 8
"""Programs that write one row's blocks."""

ROWS = 256
"""Rows whose lengths a program adds up at a time."""

LEAST_BLOCK, MOST_BLOCK = 32, 128


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; as measured on an H200 with K/V of 330 and 1,024 positions that lie apart."""

    block: int  # positions
    warps: int
    programs: int  # on a multiprocessor, of all key heads
    parts: int  # of a row that are joined at a time

    @classmethod
    def of(cls, num_rows: int, group: int) -> Tiling:
        """For this many rows whose key heads have `group` query heads each."""
        if num_rows <= 4:
            return cls(64, 4, 2, 8)
        if num_rows <= 16:
            return cls(128, 4, 2, 4)
        if num_rows <= 96:
            return cls(64, 2, 4, 1)
        return cls(64, 4, 8, 1) if group >= 4 else cls(32, 1, 6, 1)


class BlockTable:
    """Memory for where the K/V of `num_rows` rows lies that see `num_positions` together, block by block."""

    def __init__(self, num_rows: int, num_positions: int, device: torch.device):
        def integers(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.first_B1 = integers(num_rows + 1)  # each row's first block, and behind them how many there are
        self.blocks_M = integers(num_rows + num_positions // LEAST_BLOCK)  # 256 x row + positions
        self.slots_ML = integers(num_rows * MOST_BLOCK + num_positions)

    def fill(
        self,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        slots_RP: torch.Tensor,
        tiling: Tiling,
        begins_B: torch.Tensor | None = None,
    ) -> DecodeBlocks:
        """Each row sees its first `lengths` positions, but those before `begins`; their slots are in the slot table."""
        num_rows = len(rows_B)
        assert slots_RP.stride(1) == 1
        _fill[(num_rows, FILLERS)](
            rows_B,
            lengths_B,
            slots_RP,
            self.first_B1,
            self.blocks_M,
            self.slots_ML,
            begins_B,
            num_rows,
            slots_RP.stride(0),
            PROGRAMS=FILLERS,
            BLOCK_B=ROWS,
            BLOCK=tiling.block,
            num_warps=2,
            **LAUNCH,
        )
        return DecodeBlocks(self, num_rows, tiling)


@dataclass(frozen=True)
class DecodeBlocks:
    """What `attend` reads; good until the table is filled again."""

    table: BlockTable
    num_rows: int
    tiling: Tiling


@cache
def multiprocessors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q_BHC: torch.Tensor,
    kv_layer: torch.Tensor,
    blocks: DecodeBlocks,
    o_BHC: torch.Tensor,
    stretches: Stretches | None = None,
) -> None:
    """Fills `o_BHC`: each row's query over its positions, and over the `stretches` that it shares with others.

    `kv_layer` is [2, T, G, C]; scores are scaled by 1 / sqrt(C). Sums are float32; a row of length 0 gives no numbers.
    """
    num_rows, num_heads, head_dim = q_BHC.shape
    num_kv_heads = kv_layer.shape[2]
    table, tiling = blocks.table, blocks.tiling
    assert num_rows == blocks.num_rows
    assert q_BHC.is_contiguous()
    assert o_BHC.is_contiguous()
    assert kv_layer.stride(3) == 1
    assert head_dim == triton.next_power_of_2(head_dim)
    group = num_heads // num_kv_heads
    programs = max(multiprocessors(q_BHC.device) * tiling.programs // num_kv_heads, 1)
    # A part's place is the sum of its program's and its row's number: each next part has at least one of them larger.
    part_BHKC = torch.empty((programs + num_rows, num_heads, head_dim), dtype=torch.float32, device=q_BHC.device)
    sums_2KH = torch.empty((2, programs + num_rows, num_heads), dtype=torch.float32, device=q_BHC.device)
    _attend[(num_kv_heads, programs)](
        q_BHC,
        kv_layer,
        table.first_B1,
        table.blocks_M,
        table.slots_ML,
        part_BHKC,
        sums_2KH,
        num_rows,
        programs,
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        head_dim**-0.5 * 1.4426950408889634,
        H=num_heads,
        Q=group,
        C=head_dim,
        BLOCK_Q=max(triton.next_power_of_2(group), 16),
        BLOCK=tiling.block,
        num_warps=tiling.warps,
        **LAUNCH,
    )
    heads = min(num_heads & -num_heads, 8 // tiling.parts)
    _join[(num_rows, num_heads // heads)](
        part_BHKC,
        sums_2KH,
        table.first_B1,
        *(stretches or (None, None, None, None)),
        o_BHC,
        num_rows,
        programs,
        stretches.items_4M.shape[1] if stretches else 0,
        H=num_heads,
        Q=group,
        C=head_dim,
        N=QUERIES,
        HEADS=heads,
        PARTS=tiling.parts,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit(do_not_specialize=["rows", "lengths", "first_out", "blocks_out", "slots_out", "begins", "num_rows"])
def _fill(
    rows,
    lengths,
    slots,
    first_out,
    blocks_out,
    slots_out,
    begins,
    num_rows,
    slots_stride,
    PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    at = tl.arange(0, BLOCK)
    follow()
    before = tl.zeros((BLOCK_B,), tl.int32)
    first = 0
    while first < index:
        other = tl.load(lengths + first + b, mask=first + b < index, other=0).to(tl.int32)
        if begins is not None:
            other -= tl.load(begins + first + b, mask=first + b < index, other=0).to(tl.int32)
        before += (other + BLOCK - 1) // BLOCK
        first += BLOCK_B
    begin = tl.sum(before, axis=0)
    length = tl.load(lengths + index).to(tl.int32)
    row = slots + tl.load(rows + index).to(tl.int64) * slots_stride
    if begins is not None:
        skipped = tl.load(begins + index).to(tl.int32)
        length -= skipped
        row += skipped
    blocks = (length + BLOCK - 1) // BLOCK
    block = tl.program_id(1)
    if block == 0:
        tl.store(first_out + index, begin)
        if index == num_rows - 1:
            tl.store(first_out + num_rows, begin + blocks)
    while block < blocks:
        position = block * BLOCK + at
        slot = tl.load(row + position, mask=position < length, other=0)
        tl.store(slots_out + (begin + block) * BLOCK + at, slot)
        tl.store(blocks_out + begin + block, index * 256 + tl.minimum(length - block * BLOCK, BLOCK))
        block += PROGRAMS


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _attend(
    q,
    kv,
    first_blocks,
    blocks,
    slots,
    part_out,
    sums_out,
    num_rows,
    programs,
    kv_stride_kind,
    kv_stride_slot,
    kv_stride_head,
    scale,
    H: tl.constexpr,
    Q: tl.constexpr,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    program = tl.program_id(1)
    h = tl.arange(0, BLOCK_Q)
    c = tl.arange(0, C)
    at = tl.arange(0, BLOCK)
    follow()
    num_blocks = tl.load(first_blocks + num_rows)
    share = tl.cdiv(num_blocks, programs)
    begin = program * share
    end = tl.minimum(begin + share, num_blocks)
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    value = tl.zeros((BLOCK_Q, C), tl.float32)
    row_before = -1
    current = tl.load(blocks + begin, mask=begin < end, other=0)
    for block in tl.range(begin, end, num_stages=2):
        coming = tl.load(blocks + block + 1, mask=block + 1 < end, other=-256)
        row = current >> 8
        inside = at < (current & 255)
        slot = tl.load(slots + block * BLOCK + at).to(tl.int64)
        place = kv + slot[:, None] * kv_stride_slot + g * kv_stride_head + c[None, :]
        k = tl.load(place).to(q.dtype.element_ty)
        v = tl.load(place + kv_stride_kind).to(q.dtype.element_ty)
        head = row * H + g * Q + h
        query = tl.load(q + head[:, None] * C + c[None, :], mask=(h < Q)[:, None], other=0.0)
        fresh = row != row_before
        best = tl.where(fresh, float("-inf"), best)
        total = tl.where(fresh, 0.0, total)
        value = tl.where(fresh, 0.0, value)
        best, total, value = take_in(best, total, value, query, k, v, inside, scale)
        if coming >> 8 != row:  # the row, or this program's share of it, is over
            index = (program + row) * H + g * Q + h
            tl.store(part_out + index[:, None].to(tl.int64) * C + c[None, :], value, mask=(h < Q)[:, None])
            tl.store(sums_out + index, best, mask=h < Q)
            tl.store(sums_out + (programs + num_rows) * H + index, total, mask=h < Q)
        row_before = row
        current = coming


@triton.jit(do_not_specialize=["items", "shares", "num_rows", "programs", "num_items"])
def _join(
    part,
    sums,
    first_blocks,
    stretch,
    stretch_sums,
    items,
    shares,
    o,
    num_rows,
    programs,
    num_items,
    H: tl.constexpr,
    Q: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    k = tl.arange(0, PARTS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, C)
    follow()
    share = tl.cdiv(tl.load(first_blocks + num_rows), programs)
    program = tl.load(first_blocks + row) // share
    last = (tl.load(first_blocks + row + 1) - 1) // share
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    value = tl.zeros((HEADS, C), tl.float32)
    while program <= last:
        used = (program + k <= last)[:, None] & (h < H)[None, :]
        index = (program + k + row)[:, None] * H + h[None, :]
        size = (programs + num_rows) * H
        best, total, value = _with_parts(best, total, value, part, sums, size, index, used, c, C)
        program += PARTS
    if stretch is not None:
        count = tl.load(shares + 2 * num_rows + row).to(tl.int32)
        item = tl.load(shares + num_rows + row).to(tl.int32)
        end = item + count
        place = (row - tl.load(items + item, mask=count > 0, other=0).to(tl.int32)) * Q + h % Q
        while item < end:
            used = (item + k < end)[:, None] & (h < H)[None, :]
            index = ((item + k)[:, None] * (H // Q) + (h // Q)[None, :]) * N + place[None, :]
            size = num_items * (H // Q) * N
            best, total, value = _with_parts(best, total, value, stretch, stretch_sums, size, index, used, c, C)
            item += PARTS
    tl.store(o + (row * H + h)[:, None] * C + c[None, :], (value / total[:, None]).to(o.dtype.element_ty))


@triton.jit
def _with_parts(best, total, value, part, sums, size, index, used, c, C: tl.constexpr):
    """The running softmax of some heads with the parts at `index`, [parts, heads], in it; there are `size` of them."""
    part_best = tl.load(sums + index, mask=used, other=float("-inf"))
    part_total = tl.load(sums + size + index, mask=used, other=0.0)
    place = part + index[:, :, None].to(tl.int64) * C + c[None, None, :]
    part_value = tl.load(place, mask=used[:, :, None], other=0.0)
    highest = tl.maximum(best, tl.max(part_best, axis=0))
    weight = tl.exp2(part_best - highest[None, :])
    fade = tl.exp2(best - highest)
    total = total * fade + tl.sum(part_total * weight, axis=0)
    value = value * fade[:, None] + tl.sum(part_value * weight[:, :, None], axis=0)
    return highest, total, value
