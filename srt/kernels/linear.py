"""L4, each rank: linear layers of a few tokens, bound by reading the weights once.

Norm, activation and residual addition of a decoder layer are computed where a product's input is read or its output
written, so that each product is one launch.

Shapes: N tokens, I input features, O output features, F = O / 2.
"""

from __future__ import annotations

import torch
import triton

from srt.kernels.row_product import Rows, multiply_rows
from srt.kernels.tile_product import Tiles, multiply_tiles

MOST_TOKENS = 64
"""Up to here a layer's products take less time than general ones and what is computed beside them.

Measured on an H200 at the shapes of Llama-3.1-8B and Qwen3-0.6B, for 1, 16, 24, 32, 40 and 64 tokens.
"""


def small_batch_linear(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out_NO: torch.Tensor | None = None,
    adds: bool = False,
) -> torch.Tensor:
    """x Wᵀ + b, with float32 sums in one fixed order -> [N, O], for N ≤ `MOST_TOKENS`.

    `norm` (weight [I], eps): x passes an RMS norm first, where the product `takes_norm`. `gated`: the weight holds a
    gate's F rows, then as many of what it gates -> silu(gate) · up, [N, F]. `out_NO`: where the result goes, to what is
    there if it `adds`, in its type; else that is x's.
    """
    num_tokens, num_inputs = x_NI.shape
    num_weights = weight_OI.shape[0]
    num_outputs = num_weights // 2 if gated else num_weights
    assert 0 < num_tokens <= MOST_TOKENS
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    if out_NO is None:
        assert not adds
        out_NO = x_NI.new_empty((num_tokens, num_outputs))
    assert out_NO.shape == (num_tokens, num_outputs)
    assert out_NO.stride(1) == 1
    rows = rows_of(num_tokens, num_weights, num_inputs)
    if rows is not None:
        multiply_rows(x_NI, weight_OI, bias_O, norm, out_NO, adds=adds, gated=gated, blocks=rows)
    else:
        assert norm is None
        tiles = tiles_of(num_tokens, num_weights, num_inputs)
        multiply_tiles(x_NI, weight_OI, bias_O, out_NO, adds=adds, gated=gated, blocks=tiles)
    return out_NO


def takes_norm(num_tokens: int, num_outputs: int, num_inputs: int) -> bool:
    """Whether the norm is part of such a product and no launch of its own."""
    return rows_of(num_tokens, num_outputs, num_inputs) is not None


def rows_of(num_tokens: int, num_outputs: int, num_inputs: int) -> Rows | None:
    """For one token, and for up to four where few outputs make few tiles; else None. Measured best, or close to it."""
    if num_tokens == 1:
        if num_inputs <= 1024:
            return Rows(4, 512, 2)
        if num_outputs <= 2048:
            return Rows(2 if num_inputs <= 2048 else 4, 2048, 4)
        return Rows(4, 4096, 4) if num_outputs > 16384 and num_inputs % 4096 == 0 else Rows(4, 2048, 8)
    if num_tokens <= 4 and num_outputs <= 2048:
        return Rows(4, min(triton.next_power_of_2(num_inputs), 2048), 8)
    return None


def tiles_of(num_tokens: int, num_outputs: int, num_inputs: int) -> Tiles:
    """Of what was measured best for 16, 32 and 64 tokens.

    As many programs as a large GPU has processors, or a little fewer, if the outputs alone are not as many.
    """
    if num_outputs >= 16384:
        return Tiles(outputs=128, inputs=128, splits=1, stages=4, warps=8)
    splits = max(min(128 // triton.cdiv(num_outputs, 64), triton.cdiv(num_inputs, 512)), 1)
    ahead = 512 if splits > 1 else 0
    if num_tokens <= 16:
        return Tiles(outputs=64, inputs=128, splits=splits, stages=6, warps=4, ahead=ahead)
    if num_tokens <= 32 and num_inputs >= 4096:
        return Tiles(outputs=64, inputs=256, splits=splits, stages=3, warps=4, ahead=ahead)
    return Tiles(outputs=64, inputs=128, splits=splits, stages=4, warps=4, ahead=ahead)
