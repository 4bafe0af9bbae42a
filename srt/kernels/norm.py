"""L4, each rank: root-mean-square normalisation.

Shapes: N tokens, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow, warps_for


def rms_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dimension (Zhang and Sennrich 2019), computed in float32."""
    assert x_ND.stride(1) == 1
    num_tokens, size = x_ND.shape
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x_ND,
            weight_D,
            y_ND,
            x_ND.stride(0),
            eps,
            D=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=warps_for(size),
            **LAUNCH,
        )
    return y_ND


@triton.jit
def _rms_norm(x, weight, y, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    follow()
    value = tl.load(x + token * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * D + d, normalised(value, w, eps, D).to(y.dtype.element_ty), mask=inside)


@triton.jit
def normalised(value, weight, eps, D: tl.constexpr):
    """Of one row, whose places behind D hold zeros."""
    return value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)) * weight
