"""L4, each rank: root-mean-square normalisation, alone and with the residual addition before it.

Shapes: N tokens, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow, warps_for


def rms_norm(x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last dimension (Zhang and Sennrich 2019), computed in float32."""
    return _launch(x_ND, None, weight_D, eps)


def add_rms_norm(x_ND: torch.Tensor, residual_ND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then the norm of the sum. The norm sees the sum before it is rounded to its type."""
    assert residual_ND.shape == x_ND.shape
    assert residual_ND.stride(1) == 1
    return _launch(x_ND, residual_ND, weight_D, eps)


def _launch(x_ND: torch.Tensor, residual_ND: torch.Tensor | None, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    assert x_ND.stride(1) == 1
    num_tokens, size = x_ND.shape
    y_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x_ND,
            residual_ND,
            weight_D,
            y_ND,
            x_ND.stride(0),
            residual_ND.stride(0) if residual_ND is not None else 0,
            eps,
            D=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=warps_for(size),
            **LAUNCH,
        )
    return y_ND


@triton.jit
def _rms_norm(x, residual, weight, y, x_stride, residual_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    follow()
    value = tl.load(x + token * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + token * residual_stride + d
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, value.to(residual.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)
    tl.store(y + token * D + d, (value * scale * w).to(y.dtype.element_ty), mask=inside)
