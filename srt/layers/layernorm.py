"""L4, each rank: root-mean-square normalisation.

Shapes: ... any leading dimensions, D the normalised one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from srt.layers.context import LayerContext, WeightSlot, WeightSlots


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · w over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, context: LayerContext, size: int, eps: float):
        self._shape = (size,)
        self._eps = eps
        self.weight_D = torch.empty(size, dtype=context.activation_dtype, device=context.device)

    def weight_slots(self) -> WeightSlots:
        yield "weight", WeightSlot(self.weight_D, self._shape)

    def __call__(self, x_D: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_D, self._shape, self.weight_D, self._eps)
