"""L4, each rank: the first half of a feed-forward block for many tokens: a gate's product, what it gates, and SwiGLU.

General matrix multiplication would write both products for another kernel to read again. Products of many tokens run at
a GPU's power limit, and there all that is not moved is time won.

Shapes: N tokens, I input features, F intermediate size of this rank.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from srt.kernels.activation import silu
from srt.kernels.launch import COMPILED, INTERPRETED, LAUNCH, OVERLAPS, follow

TOKENS = 128
OUTPUTS = 128
"""Of a tile: as many sums as the registers of a processor of compute capability 9.0 hold, with the gate's."""

INPUTS = 64
"""Of a step: 128 bytes, as wide as the copy engine's pattern in shared memory."""

GROUP = 16
"""Rows of tiles that are computed together, so that what they share is still in the L2."""

STAGES = 3
"""A fourth would fit, is faster in bursts, and costs 3 % at the power limit of an H200."""

LEAST_FILLED = 0.8
"""Of the processors' time; below, general matrix multiplication, which has more shapes of tiles, wins. Measured on an
H200 at the shapes of Llama-3.1-8B and Qwen3-0.6B, from 72 to 4,096 tokens."""

LEAST_FILLED_AT_ONCE = 0.88
"""The same for one round of tiles with several rows of them: no tile's end hides behind the beginning of another, nor
behind weights that are read once only. Measured at half of Llama-3.1-8B's shape, 256 tokens."""


def swiglu_linear(x_NI: torch.Tensor, weight_2FI: torch.Tensor) -> torch.Tensor:
    """silu(x Gᵀ) · (x Uᵀ) -> [N, F], with float32 sums; the weight holds G's F rows, then U's. See `fits`."""
    num_tokens, num_inputs = x_NI.shape
    size = len(weight_2FI) // 2
    assert fits(x_NI, weight_2FI)
    y_NF = x_NI.new_empty((num_tokens, size))
    tiles = triton.cdiv(num_tokens, TOKENS) * (size // OUTPUTS)
    programs = min(tiles, processors(x_NI.device))
    _swiglu_product[(programs,)](
        TensorDescriptor.from_tensor(x_NI, [TOKENS, INPUTS]),
        TensorDescriptor.from_tensor(weight_2FI.view(2, size, num_inputs), [2, OUTPUTS, INPUTS]),
        TensorDescriptor.from_tensor(y_NF, [TOKENS, OUTPUTS]),
        num_tokens,
        F=size,
        I=num_inputs,
        TOKENS=TOKENS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        GROUP=GROUP,
        num_warps=8,
        num_stages=STAGES,
        **LAUNCH,
    )
    return y_NF


def fits(x_NI: torch.Tensor, weight_2FI: torch.Tensor) -> bool:
    """Whether the GPU has a copy engine, rows lie as it wants them, and whole tiles cover the weight."""
    num_weights, num_inputs = weight_2FI.shape
    whole = num_weights % (2 * OUTPUTS) == 0 and num_inputs % INPUTS == 0
    able = OVERLAPS or INTERPRETED
    return able and whole and x_NI.element_size() == 2 and x_NI.stride(1) == 1 and x_NI.stride(0) % 8 == 0


def wins(num_tokens: int, size: int, device: torch.device) -> bool:
    """Whether so many tokens fill the last round of tiles well enough, F being `size`."""
    rows = triton.cdiv(num_tokens, TOKENS)
    rounds = triton.cdiv(rows * triton.cdiv(size, OUTPUTS), processors(device))
    least = LEAST_FILLED_AT_ONCE if rounds == 1 and rows > 1 else LEAST_FILLED
    return num_tokens * size >= least * rounds * processors(device) * TOKENS * OUTPUTS


@functools.cache
def processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["num_tokens"])
def _swiglu_product(
    x,
    weight,
    y,
    num_tokens,
    F: tl.constexpr,
    I: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows = tl.cdiv(num_tokens, TOKENS)
    columns: tl.constexpr = F // OUTPUTS
    follow()
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * columns) * GROUP
        group = tl.minimum(rows - first, GROUP)
        n = (first + tile % (GROUP * columns) % group) * TOKENS
        f = tile % (GROUP * columns) // group * OUTPUTS
        total = tl.zeros((TOKENS, 2 * OUTPUTS), tl.float32)
        for step in range(I // INPUTS):
            value = x.load([n, step * INPUTS])
            w = tl.reshape(weight.load([0, f, step * INPUTS]), (2 * OUTPUTS, INPUTS))
            if not COMPILED:  # the interpreter cannot multiply bfloat16
                value, w = value.to(tl.float32), w.to(tl.float32)
            total = tl.dot(value, w.T, total)
        gate, up = tl.split(tl.permute(tl.reshape(total, (TOKENS, 2, OUTPUTS)), (0, 2, 1)))
        y.store([n, f], (silu(gate) * up).to(y.dtype))
