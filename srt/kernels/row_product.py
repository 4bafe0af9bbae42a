"""L4, each rank: products of very few tokens on the ordinary arithmetic units, bound by reading the weights once.

Each program streams some rows of the weight past all tokens. The RMS norm of the input costs nothing here: its factor
is known when the product is, and applied then. So do a bias, a gate and the addition to the residual stream.

Shapes: N tokens, I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.activation import silu
from srt.kernels.launch import LAUNCH, follow

VECTOR = tl.constexpr(8)
"""Neighbouring inputs that one thread multiplies and sums: 16 bytes of weights."""


@dataclass(frozen=True)
class Rows:
    """Outputs and inputs of a program's step, and its warps."""

    outputs: int
    inputs: int
    warps: int


def multiply_rows(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    y: torch.Tensor,
    *,
    adds: bool,
    gated: bool,
    blocks: Rows,
) -> None:
    """As `linear.small_batch_linear`, into `y`, to what is there if `adds`. Sums are made in one fixed order."""
    _multiply_rows[(triton.cdiv(weight_OI.shape[0], blocks.outputs),)](
        x_NI,
        weight_OI,
        bias_O,
        norm and norm[0],
        y,
        len(x_NI),
        y.shape[1],
        norm[1] if norm else 0.0,
        x_NI.stride(0),
        y.stride(0),
        TOKENS=triton.next_power_of_2(len(x_NI)),
        I=x_NI.shape[1],
        ADDS=adds,
        GATED=gated,
        BLOCK_O=blocks.outputs,
        BLOCK_I=blocks.inputs,
        num_warps=blocks.warps,
        **LAUNCH,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_rows(
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
