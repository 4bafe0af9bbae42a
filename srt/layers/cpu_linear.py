"""L4, each rank: how a CPU multiplies with a weight, by what the CPU can do. Chosen once, when a layer is packed.

Shapes: N tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from srt.kernels import cpu

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""float32 [N, I] -> float32 [N, O], the bias added."""

LARGEST_HALF = torch.finfo(torch.float16).max

FEW_ROWS = 6
"""Up to here a multiplication is bound by reading the weight, and no number format is faster than another."""


def packed(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, spend_memory: bool) -> Multiply:
    """A multiplication that keeps its own copy of the weight, or two of them if it may spend the memory.

    Weights go to our own kernel. Where that was not compiled, two-byte ones go to FBGEMM's, which reads blocked
    float16 and multiplies in float32: bfloat16's 8 bits of mantissa fit into float16's 11, and what is smaller than its
    least normal number keeps an absolute precision of 3e-8. Where the CPU multiplies bfloat16 natively, oneDNN computes
    many rows faster than either.
    """
    few: Multiply | None = None
    if cpu.AVAILABLE:
        few = cpu.PanelLinear(weight_OI, bias_O)
    elif weight_OI.dtype != torch.float32 and packs_float16() and float(weight_OI.abs().max()) <= LARGEST_HALF:
        few = FbgemmFloat16(weight_OI, bias_O)
    if weight_OI.dtype == torch.bfloat16 and multiplies_bfloat16():
        many = OneDnn(weight_OI, bias_O)
        return ByRows(few, many) if few and spend_memory else many
    if few:
        return few
    if packs_float32():
        return OneDnn(weight_OI.float(), None if bias_O is None else bias_O.float())
    return Plain(weight_OI, bias_O)


class ByRows:
    def __init__(self, few: Multiply, many: Multiply):
        self._few = few
        self._many = many

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._few(x_NI) if len(x_NI) <= FEW_ROWS else self._many(x_NI)


class FbgemmFloat16:
    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        bias_O = None if bias_O is None else bias_O.float()
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight_OI.float(), bias_O)

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x_NI, self._weight)


class OneDnn:
    """Computes in the weight's own type.

    For each new number of rows oneDNN compiles a kernel, which takes milliseconds and a third of a megabyte that it
    never gives back. So rows are filled up to one of a few numbers.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
        self._bias_O = bias_O
        self._dtype = weight_OI.dtype

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        num_tokens = len(x_NI)
        x_NI = F.pad(x_NI.to(self._dtype), (0, 0, 0, filled_up(num_tokens) - num_tokens))
        y_NO = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias_O, "none", [], "")
        return y_NO[:num_tokens].float()


def filled_up(num_rows: int) -> int:
    """The next of the numbers up to 8, and from there on of four between a power of two and the next."""
    step = 1 << max((num_rows - 1).bit_length() - 3, 0)
    return -(-num_rows // step) * step


class Plain:
    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        self._weight_OI = weight_OI.float()
        self._bias_O = None if bias_O is None else bias_O.float()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NI, self._weight_OI, self._bias_O)


@cache
def multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() and works(OneDnn, torch.bfloat16)


@cache
def packs_float16() -> bool:
    return works(FbgemmFloat16, torch.float16)


@cache
def packs_float32() -> bool:
    return works(OneDnn, torch.float32)


def works(multiply: Callable[[torch.Tensor, torch.Tensor | None], Multiply], dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators on this CPU, seen by trying: they are not all part of its API."""
    weight_OI = torch.arange(-24.0, 24.0).view(6, 8) / 8
    x_NI = torch.arange(-20.0, 20.0).view(5, 8) / 4
    try:
        return torch.allclose(multiply(weight_OI.to(dtype), None)(x_NI), x_NI @ weight_OI.T, rtol=1e-2, atol=1e-2)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
