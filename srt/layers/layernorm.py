"""L4, each rank: root-mean-square normalisation.

Shapes: ... any leading dimensions, D the normalised one.
"""

from __future__ import annotations

import math

import torch

from srt.kernels import cpu
from srt.layers.context import LayerContext, WeightSlot, WeightSlots


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · w over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, context: LayerContext, size: int, eps: float, rotary_dim: int = 0):
        self._size = size
        self.eps = eps
        self._on_gpu = context.on_gpu
        self._parallel = context.parallel
        self._rotary_dim = rotary_dim
        self._compiled = cpu.serves(context.device, size)
        self._root_of_size = math.sqrt(size)
        place = {"dtype": context.activation_dtype, "device": context.device}
        self._root_of_eps = torch.full((1,), math.sqrt(size * eps), **place)
        self.weight_D = torch.empty(size, **place)

    def weight_slots(self) -> WeightSlots:
        yield "weight", WeightSlot(self.weight_D, (self._size,), rotary_dim=self._rotary_dim)

    def pack(self) -> None:
        if not self._on_gpu and not self._compiled:
            self.weight_D *= self._root_of_size

    def of_sum(self, x_ND: torch.Tensor | None, residual_ND: torch.Tensor) -> torch.Tensor:
        """Adds `x_ND`, if there is one, to the residual stream in place, and normalises that.

        On GPUs nothing is left to add but what the other ranks hold of the stream.
        """
        if self._on_gpu:
            assert x_ND is None
            exchange = self._parallel.exchange
            if exchange is not None and exchange.takes(residual_ND):
                return exchange.all_reduce(residual_ND, self.weight_D, self.eps)
            self._parallel.all_reduce(residual_ND)
            return self(residual_ND)
        if x_ND is not None:
            residual_ND += x_ND
        return self(residual_ND)

    def __call__(self, x_D: torch.Tensor) -> torch.Tensor:
        if self._on_gpu:
            from srt.kernels import norm

            return norm.rms_norm(x_D, self.weight_D, self.eps)
        if self._compiled:
            return cpu.rms_norm(x_D, self.weight_D, self.eps)
        # The same as above with sqrt(D) taken out of the root: four operations, of which a CPU notices each.
        norm_1 = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True)
        return x_D.div(torch.hypot(norm_1, self._root_of_eps)).mul_(self.weight_D)
