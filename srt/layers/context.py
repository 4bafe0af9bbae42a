"""L4, each rank: what every layer is built with, and how it takes its weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from srt.parallel import ParallelContext


@dataclass(frozen=True)
class LayerContext:
    """Where a layer lives, in which type it keeps its weights, and which shard of them."""

    dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext
    spend_memory: bool = False  # the model is so small that its weights may be kept in two layouts

    @property
    def on_gpu(self) -> bool:
        """Layers then call the fused kernels of `srt/kernels`, imported only then: a CPU need not have Triton."""
        return self.device.type == "cuda"

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of what flows between layers. A CPU computes in float32: it has few or no instructions for narrower types."""
        return self.dtype if self.on_gpu else torch.float32

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class WeightSlot:
    """A place for one checkpoint tensor of shape `shape`: `target` takes its part [start, start + n) along `dim`.

    `target` is a view into the layer's own, possibly fused, weight. With `rotary_dim`, the first dimension counts
    features of heads that wide, and the halves of each head are interleaved: see `srt/layers/rotary_embedding.py`.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    rotary_dim: int = 0

    def fill(self, tensor: torch.Tensor) -> None:
        assert tuple(tensor.shape) == self.shape
        part = tensor.narrow(self.dim, self.start, self.target.shape[self.dim])
        if self.rotary_dim:
            part = part.unflatten(0, (-1, 2, self.rotary_dim // 2)).transpose(1, 2).flatten(0, 2)
        self.target.copy_(part)


WeightSlots = Iterator[tuple[str, WeightSlot]]
"""Checkpoint names, relative to the layer that yields them, and where their tensors go."""


def under(prefix: str, slots: WeightSlots) -> WeightSlots:
    for name, slot in slots:
        yield prefix + name, slot
