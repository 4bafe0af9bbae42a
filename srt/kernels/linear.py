"""L4, each rank: linear layers of a few tokens, bound by reading the weights once.

Norm, activation and residual addition of a decoder layer are computed where a product's input is read or its output
written, so that each product is one launch.

Shapes: N tokens, I input features, O output features, F = O / 2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.activation import silu
from srt.kernels.launch import COMPILED, LAUNCH, follow

MOST_TOKENS = 4
"""Beyond, general matrix multiplication wins."""

VECTOR = tl.constexpr(8)
"""Neighbouring inputs that one thread multiplies and sums: 16 bytes of weights."""


@dataclass(frozen=True)
class Blocks:
    """How `multiply` cuts a product: outputs of a tile, inputs of a step, programs that share a tile's inputs."""

    outputs: int
    inputs: int
    splits: int
    stages: int
    warps: int


def small_batch_linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual_NO: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x Wᵀ + b, with float32 sums in one fixed order -> [N, O], for N ≤ `MOST_TOKENS`.

    `norm` (weight [I], eps): x passes an RMS norm first. `residual_NO`: the product is added to it in place, and it is
    returned. `gated`: the weight holds a gate's F rows, then as many of what it gates -> silu(gate) · up, [N, F].
    """
    num_tokens, num_inputs = x_NI.shape
    num_outputs = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    assert 0 < num_tokens <= MOST_TOKENS
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    assert not (gated and residual_NO is not None)
    if residual_NO is None:
        y_NO = x_NI.new_empty((num_tokens, num_outputs))
    else:
        y_NO = residual_NO
        assert y_NO.shape == (num_tokens, num_outputs)
        assert y_NO.stride(1) == 1
    block_o, block_i, num_warps = block_sizes(num_tokens, weight_OI.shape[0], num_inputs)
    _small_batch_linear[(triton.cdiv(weight_OI.shape[0], block_o),)](
        x_NI,
        weight_OI,
        bias_O,
        norm and norm[0],
        y_NO,
        num_tokens,
        num_outputs,
        norm[1] if norm else 0.0,
        x_NI.stride(0),
        y_NO.stride(0),
        TOKENS=triton.next_power_of_2(num_tokens),
        I=num_inputs,
        ADDS=residual_NO is not None,
        GATED=gated,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=num_warps,
        **LAUNCH,
    )
    return y_NO


def wins(num_tokens: int, num_outputs: int, num_inputs: int) -> bool:
    """Whether `small_batch_linear` is faster than general matrix multiplication, as measured on an H200.

    One token's product is bound by the memory at any size. Several tokens' take so much arithmetic that only products
    which a general kernel cuts into too few blocks are won.
    """
    if num_tokens > 1 and num_inputs > 1024 and num_outputs > 4096:
        return False
    return num_tokens == 1 or (num_tokens <= MOST_TOKENS and num_outputs <= 8192)


def block_sizes(num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Outputs and inputs of a program's step, and its warps. Measured best, or close, at the shapes of two models."""
    if num_tokens > 1:
        if num_outputs <= 2048:
            return 4, min(triton.next_power_of_2(num_inputs), 2048), 8
        return (8, 512, 2) if num_inputs <= 1024 else (8, 1024, 4)
    if num_inputs <= 1024:
        return 8, triton.next_power_of_2(num_inputs), 4
    if num_outputs <= 2048:
        return 2, 2048, 8
    return (2, 4096, 4) if num_inputs % 4096 == 0 else (4, 2048, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _small_batch_linear(
    x,
    weight,
    bias,
    norm,
    y,
    num_tokens,
    num_outputs,
    eps,
    x_stride,
    y_stride,
    TOKENS: tl.constexpr,
    I: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    LAST: tl.constexpr = (I - 1) // BLOCK_I * BLOCK_I
    j = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    # A gate and what it gates are neighbours in the block.
    o = j // 2 + (j % 2) * num_outputs if GATED else j
    exists = j < (2 * num_outputs if GATED else num_outputs)
    o = tl.where(exists, o, 0)
    n = tl.arange(0, TOKENS)
    rows = weight + o.to(tl.int64)[:, None] * I
    w = load_weights(rows, 0, I, BLOCK_I)
    follow()

    tokens = x + tl.minimum(n, num_tokens - 1)[:, None] * x_stride
    total = tl.zeros((TOKENS, BLOCK_O, BLOCK_I // VECTOR), tl.float32)
    squares = tl.zeros((TOKENS, BLOCK_I), tl.float32)
    for first in range(0, LAST, BLOCK_I):
        # The next weights are under way while these are multiplied.
        next_w = load_weights(rows, first + BLOCK_I, I, BLOCK_I)
        total, squares = accumulate(total, squares, w, tokens, norm, first, I, TOKENS, BLOCK_O, BLOCK_I)
        w = next_w
    total, squares = accumulate(total, squares, w, tokens, norm, LAST, I, TOKENS, BLOCK_O, BLOCK_I)

    result = tl.sum(total, axis=2)
    if norm is not None:
        result *= 1.0 / tl.sqrt(tl.sum(squares, axis=1, keep_dims=True) / I + eps)
    if bias is not None:
        result += tl.load(bias + o, mask=exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(result, (TOKENS, BLOCK_O // 2, 2)))
        result = silu(gate) * up
        o = tl.program_id(0) * (BLOCK_O // 2) + tl.arange(0, BLOCK_O // 2)
        exists = o < num_outputs
    place = y + n[:, None] * y_stride + o[None, :]
    inside = (n < num_tokens)[:, None] & exists[None, :]
    if ADDS:
        result += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def load_weights(rows, first, I: tl.constexpr, BLOCK_I: tl.constexpr):
    i = first + tl.arange(0, BLOCK_I)[None, :]
    if I % BLOCK_I == 0:
        return tl.load(rows + i, eviction_policy="evict_first")
    return tl.load(rows + i, mask=i < I, other=0.0, eviction_policy="evict_first")


@triton.jit
def accumulate(
    total,
    squares,
    w,
    tokens,
    norm,
    first,
    I: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    i = first + tl.arange(0, BLOCK_I)[None, :]
    inside = i < I
    value = tl.load(tokens + i, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares += value * value
        value *= tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    products = tl.reshape(w.to(tl.float32), (1, BLOCK_O, BLOCK_I // VECTOR, VECTOR)) * tl.reshape(
        value, (TOKENS, 1, BLOCK_I // VECTOR, VECTOR)
    )
    return total + tl.sum(products, axis=3), squares


# ---- up to 64 tokens ------------------------------------------------------------------------------------------------


def multiply(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    y_NO: torch.Tensor,
    adds: bool,
    gated: bool,
    blocks: Blocks,
) -> None:
    num_tokens, num_inputs = x_NI.shape
    num_weights, num_outputs = weight_OI.shape[0], y_NO.shape[1]
    tiles = triton.cdiv(num_weights, blocks.outputs)
    tokens = max(triton.next_power_of_2(num_tokens), 16)
    partial = counters = None
    if blocks.splits > 1:
        shape = (blocks.splits, tiles, blocks.outputs, tokens)
        partial = torch.empty(shape, dtype=torch.float32, device=x_NI.device)
        counters = tile_counters(x_NI.device, tiles)
    _multiply[(tiles, blocks.splits)](
        x_NI,
        weight_OI,
        bias_O,
        y_NO,
        partial,
        counters,
        num_tokens,
        num_outputs,
        x_NI.stride(0),
        y_NO.stride(0),
        TOKENS=tokens,
        I=num_inputs,
        ADDS=adds,
        GATED=gated,
        BLOCK_O=blocks.outputs,
        BLOCK_I=blocks.inputs,
        SPLITS=blocks.splits,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        **LAUNCH,
    )


@functools.cache
def tile_counters(device: torch.device, tiles: int) -> torch.Tensor:
    """How many parts of each tile are there: zero between two launches, of which there is one at a time."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
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
    i = split * STEPS * BLOCK_I + tl.arange(0, BLOCK_I)
    rows = weight + o.to(tl.int64)[:, None] * I
    columns = x + tl.minimum(n, num_tokens - 1)[None, :] * x_stride
    follow()

    total = tl.zeros((BLOCK_O, TOKENS), tl.float32)
    for _ in tl.range(0, STEPS, num_stages=STAGES):
        if EVEN:
            w = tl.load(rows + i[None, :], eviction_policy="evict_first")
            value = tl.load(columns + i[:, None])
        else:
            w = tl.load(rows + i[None, :], mask=(i < I)[None, :], other=0.0, eviction_policy="evict_first")
            value = tl.load(columns + i[:, None], mask=(i < I)[:, None], other=0.0)
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
