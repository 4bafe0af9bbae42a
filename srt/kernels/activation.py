"""L4, each rank: activations of the feed-forward block.

Shapes: N tokens, F intermediate size of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

BLOCK = 1024


def silu_and_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) · up -> [N, F], computed in float32."""
    assert gate_up_N2F.stride(1) == 1
    num_tokens, size = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    y_NF = gate_up_N2F.new_empty((num_tokens, size))
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _silu_and_mul[grid](gate_up_N2F, y_NF, gate_up_N2F.stride(0), F=size, BLOCK=BLOCK, num_warps=4, **LAUNCH)
    return y_NF


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul(gate_up, y, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    follow()
    place = gate_up + token * stride + f
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * F + f, (silu(gate) * up).to(y.dtype.element_ty), mask=inside)
