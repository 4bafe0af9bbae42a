"""L4, each rank: sums over the ranks of one host whose GPUs write into each other's memory.

NCCL's sum of a few rows takes longer than the product before it, most of the time in meeting. Here nobody meets: each
rank sends its part to all others, waits until theirs have come, and adds all in the order of the ranks, so that every
rank has the same bits. A norm of the sum costs nothing more.

What is sent tells itself when it is there. A place that waits for a number holds `EMPTY`, one of the bit patterns that
are no number; who sends that sends another one. Numbers are 16 bits wide and a GPU writes no part of one, so it does
not matter in which order they arrive. They arrive in the L2 of the reader's GPU, past which no volatile load looks. The
reader puts `EMPTY` back.

A row has places for each rank in two halves, used in turn. So what is sent meets a place that was read and emptied:

- a rank sends into a half again in its row's round r + 2, after its round r + 1 ended;
- which needed what the reader sent in round r + 1, with a kernel that began when that of round r had ended (see
  `launch.follow`), in which it read and emptied its places; and those are in its own memory, where both meet.

Which half is next stands in the memory of the GPU, a row for itself. So launches of any numbers of rows may follow each
other, alone or from CUDA graphs, as long as all ranks launch the same.

Each program sends before it waits, and GPUs start programs in order. So the first row that is not done is under way on
all ranks, however many programs a GPU holds. If a rank dies the others wait for ever, until their processes are killed.

Shapes: N rows, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow, warps_for
from srt.kernels.norm import normalised

EMPTY = tl.constexpr(-1)
INSTEAD = tl.constexpr(0x7FFF)
"""No number either, in bfloat16 as in float16."""

MOST_ROWS = 1024
"""Over all ranks. A rank sends its rows to each other one, so with more ranks NCCL wins earlier.

On two H200, rows of 4,096: 1 takes 2.6 us and NCCL's sum 7.3, 16 3.7 and 8.2, 256 9.7 and 28.4, 512 15.6 and 33.6.
"""


@dataclass(frozen=True)
class Exchange:
    """The places where ranks write what they send each other, for rows of up to `width` numbers of type `dtype`."""

    rank: int
    size: int
    width: int  # a power of two
    dtype: torch.dtype
    addresses: tuple[int, ...]  # where each rank's places begin
    halves_N: torch.Tensor  # int32: the half that each row uses next
    places: torch.Tensor  # this rank's

    @staticmethod
    def open(rank: int, size: int, group: Any, width: int, dtype: torch.dtype) -> Exchange:
        """On the current GPU, with all ranks at once. None may send before all have come back."""
        device = torch.device("cuda", torch.cuda.current_device())
        places = symmetric_memory.empty(places_shape(size, width), dtype=torch.int16, device=device)
        blocks = symmetric_memory.rendezvous(places, group.group_name).buffer_ptrs
        start = places.data_ptr() - blocks[rank]  # in each rank's block, since all have allocated alike
        return Exchange.of(rank, tuple(block + start for block in blocks), places, dtype)

    @staticmethod
    def of(rank: int, addresses: tuple[int, ...], places: torch.Tensor, dtype: torch.dtype) -> Exchange:
        """`places`: this rank's own, to be emptied."""
        most_rows, _, size, width = places.shape
        places.fill_(EMPTY.value)
        halves_N = torch.zeros(most_rows, dtype=torch.int32, device=places.device)
        if places.is_cuda:
            torch.cuda.synchronize()
        return Exchange(rank, size, width, dtype, addresses, halves_N, places)

    def takes(self, x_ND: torch.Tensor) -> bool:
        """Whether these are few enough rows that this is faster than NCCL."""
        num_rows, size = x_ND.shape
        return x_ND.dtype == self.dtype and 0 < num_rows <= len(self.halves_N) and size <= self.width

    def all_reduce(
        self, x_ND: torch.Tensor, norm_D: torch.Tensor | None = None, eps: float = 0.0
    ) -> torch.Tensor | None:
        """Puts the sum over ranks in place of this rank's part, and gives its RMS norm if that has a weight."""
        assert self.takes(x_ND)
        assert x_ND.stride(1) == 1
        num_rows, size = x_ND.shape
        normed_ND = None if norm_D is None else torch.empty_like(x_ND, memory_format=torch.contiguous_format)
        _add_parts[(num_rows,)](
            x_ND,
            norm_D,
            normed_ND,
            self.addresses,
            self.halves_N,
            x_ND.stride(0),
            eps,
            RANK=self.rank,
            RANKS=self.size,
            D=size,
            BLOCK=triton.next_power_of_2(size),
            WIDTH=self.width,
            num_warps=warps_for(size),
            **LAUNCH,
        )
        return normed_ND


def places_shape(num_ranks: int, width: int) -> tuple[int, ...]:
    """Of a rank's places for rows of so many features, int16: rows, halves, senders, features."""
    return (MOST_ROWS // num_ranks, 2, num_ranks, triton.next_power_of_2(width))


@triton.jit
def _add_parts(
    x,
    norm,
    normed,
    addresses,
    halves,
    x_stride,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if norm is not None:
        weight = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    follow()
    half = tl.load(halves + row)
    place = x + row.to(tl.int64) * x_stride + d
    own = tl.load(place, mask=inside, other=0.0)
    bits = own.to(tl.int16, bitcast=True)
    bits = tl.where(bits == EMPTY, INSTEAD, bits).to(tl.int16)
    first = (row * 2 + half) * (RANKS * WIDTH) + d
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(places_at(addresses[rank]) + first + RANK * WIDTH, bits, mask=inside)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            part = receive(places_at(addresses[RANK]) + first + rank * WIDTH, inside)
            total += part.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.store(place, total.to(x.dtype.element_ty), mask=inside)
    if norm is not None:
        y = normalised(total, weight, eps, D)
        tl.store(normed + row.to(tl.int64) * D + d, y.to(x.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all of the program have read which half this is
    tl.store(halves + row, 1 - half)


@triton.jit
def places_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def receive(places, inside):
    """The bits, once none of them is missing."""
    bits = tl.load(places, mask=inside, other=0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32), axis=0) == 1:
        bits = tl.load(places, mask=inside, other=0, volatile=True)
    tl.store(places, tl.full(bits.shape, EMPTY, tl.int16), mask=inside)
    return bits
