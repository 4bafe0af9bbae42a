"""L4, each rank: products of up to 64 tokens on the matrix units, bound by reading the weights once.

Few tokens make few tiles, too few to keep the memory busy, so several programs share a tile's inputs; whoever comes
last adds their parts. A bias, a gate and the addition to the residual stream are computed there.

Shapes: N tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.activation import silu
from srt.kernels.launch import COMPILED, LAUNCH, follow, prefetch

LINE = tl.constexpr(64)
"""16-bit numbers that the memory delivers together."""


@dataclass(frozen=True)
class Tiles:
    """Outputs of a tile, inputs of a step, programs that share a tile, steps under way, and warps.

    `ahead`: inputs whose weights are asked for while the kernel before still runs; 0, or a power of two from 64 on.
    """

    outputs: int
    inputs: int
    splits: int
    stages: int
    warps: int
    ahead: int = 0


def multiply_tiles(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    y: torch.Tensor,
    *,
    adds: bool,
    gated: bool,
    blocks: Tiles,
) -> None:
    """As `linear.small_batch_linear`, into `y`, to what is there if `adds`. Sums are made in one fixed order."""
    num_tokens, num_inputs = x_NI.shape
    num_weights, num_outputs = weight_OI.shape[0], y.shape[1]
    tiles = triton.cdiv(num_weights, blocks.outputs)
    # Few variants, as each takes a second to compile.
    tokens = next(size for size in (16, 32, 64) if num_tokens <= size)
    partial = counters = None
    if blocks.splits > 1:
        shape = (blocks.splits, tiles, blocks.outputs, tokens)
        partial = torch.empty(shape, dtype=torch.float32, device=x_NI.device)
        counters = tile_counters(x_NI.device, tiles)
    _multiply_tiles[(tiles, blocks.splits)](
        x_NI,
        weight_OI,
        bias_O,
        y,
        partial,
        counters,
        num_tokens,
        num_outputs,
        x_NI.stride(0),
        y.stride(0),
        TOKENS=tokens,
        I=num_inputs,
        ADDS=adds,
        GATED=gated,
        BLOCK_O=blocks.outputs,
        BLOCK_I=blocks.inputs,
        SPLITS=blocks.splits,
        STAGES=blocks.stages,
        AHEAD=blocks.ahead,
        num_warps=blocks.warps,
        **LAUNCH,
    )


@functools.cache
def tile_counters(device: torch.device, tiles: int) -> torch.Tensor:
    """How many parts of each tile are there: zero between two launches, of which there is one at a time.

    A CUDA graph would keep the first use's zeros to itself, so a product runs once before it is captured.
    """
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing()
    return torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_tiles(
    x,
    weight,
    bias,
    y,
    partial,
    counters,
    num_tokens,
    num_outputs,
    x_stride,
    y_stride,
    TOKENS: tl.constexpr,
    I: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    STEPS: tl.constexpr = (I + BLOCK_I * SPLITS - 1) // (BLOCK_I * SPLITS)
    EVEN: tl.constexpr = STEPS * BLOCK_I * SPLITS == I
    tile = tl.program_id(0)
    split = tl.program_id(1)
    j = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    # A gate and what it gates are neighbours in the block. Behind the last output it is computed again.
    o = j // 2 + (j % 2) * num_outputs if GATED else j
    o = tl.minimum(o, (2 * num_outputs if GATED else num_outputs) - 1)
    n = tl.arange(0, TOKENS)
    exists = (n < num_tokens)[None, :]
    first = split * STEPS * BLOCK_I
    i = first + tl.arange(0, BLOCK_I)
    rows = weight + o.to(tl.int64)[:, None] * I
    columns = x + n[None, :] * x_stride
    if AHEAD:
        prefetch(rows + tl.minimum(first + tl.arange(0, AHEAD // LINE) * LINE, I - 1)[None, :])
    follow()

    total = tl.zeros((BLOCK_O, TOKENS), tl.float32)
    for _ in tl.range(0, STEPS, num_stages=STAGES):
        if EVEN:
            w = tl.load(rows + i[None, :], eviction_policy="evict_first")
            value = tl.load(columns + i[:, None], mask=exists, other=0.0)
        else:
            w = tl.load(rows + i[None, :], mask=(i < I)[None, :], other=0.0, eviction_policy="evict_first")
            value = tl.load(columns + i[:, None], mask=exists & (i < I)[:, None], other=0.0)
        if not COMPILED:  # the interpreter cannot multiply bfloat16
            w, value = w.to(tl.float32), value.to(tl.float32)
        total = tl.dot(w, value, total)
        i += BLOCK_I

    if SPLITS > 1:
        place = partial + tile * BLOCK_O * TOKENS + tl.arange(0, BLOCK_O)[:, None] * TOKENS + n[None, :]
        size = tl.num_programs(0) * BLOCK_O * TOKENS
        tl.store(place + split * size, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            # Whoever comes last adds all parts in their order, so that the sum is the same every time.
            total = tl.zeros((BLOCK_O, TOKENS), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(place + part * size, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            finish(total, bias, y, o, n, num_tokens, num_outputs, y_stride, ADDS, GATED, BLOCK_O, TOKENS)
    else:
        finish(total, bias, y, o, n, num_tokens, num_outputs, y_stride, ADDS, GATED, BLOCK_O, TOKENS)


@triton.jit
def finish(
    total,
    bias,
    y,
    o,
    n,
    num_tokens,
    num_outputs,
    y_stride,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    TOKENS: tl.constexpr,
):
    if bias is not None:
        total += tl.load(bias + o).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_O // 2, 2, TOKENS)), (0, 2, 1)))
        write(silu(gate) * up, y, n, num_tokens, num_outputs, y_stride, ADDS, BLOCK_O // 2)
    else:
        write(total, y, n, num_tokens, num_outputs, y_stride, ADDS, BLOCK_O)


@triton.jit
def write(value, y, n, num_tokens, num_outputs, y_stride, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    o = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = y + n[None, :] * y_stride + o[:, None]
    inside = (n < num_tokens)[None, :] & (o < num_outputs)[:, None]
    if ADDS:
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, value.to(y.dtype.element_ty), mask=inside)
