"""L4, each rank: how a CPU multiplies with a weight, by what the CPU can do. Chosen once, when a layer is packed.

Shapes: N tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""float32 [N, I] -> float32 [N, O], the bias added."""

LARGEST_HALF = torch.finfo(torch.float16).max


def packed(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Multiply:
    """A multiplication that keeps its own copy of the weight.

    Two-byte weights: where the CPU multiplies bfloat16 natively, oneDNN's blocked layout. Elsewhere FBGEMM's kernels,
    which read blocked float16 and multiply in float32: bfloat16's 8 bits of mantissa fit into float16's 11, and what is
    smaller than float16's least normal number keeps an absolute precision of 3e-8. Where neither is, float32.
    """
    if weight_OI.dtype == torch.bfloat16 and multiplies_bfloat16():
        return OneDnnBfloat16(weight_OI, bias_O)
    if weight_OI.dtype != torch.float32 and packs_float16() and float(weight_OI.abs().max()) <= LARGEST_HALF:
        return FbgemmFloat16(weight_OI, bias_O)
    return Plain(weight_OI, bias_O)


class FbgemmFloat16:
    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        bias_O = None if bias_O is None else bias_O.float()
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight_OI.float(), bias_O)

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x_NI, self._weight)


class OneDnnBfloat16:
    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
        self._bias_O = bias_O

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        y_NO = torch.ops.mkldnn._linear_pointwise(x_NI.bfloat16(), self._weight, self._bias_O, "none", [], "")
        return y_NO.float()


class Plain:
    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        self._weight_OI = weight_OI.float()
        self._bias_O = None if bias_O is None else bias_O.float()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NI, self._weight_OI, self._bias_O)


@cache
def multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


@cache
def packs_float16() -> bool:
    try:
        FbgemmFloat16(torch.zeros(1, 1), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True
