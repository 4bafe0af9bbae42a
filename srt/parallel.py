"""L4, each rank: which shard of the model this process holds, and the collectives between the shards.

Layers call these at the places where a sharded model must talk; with one rank they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ParallelContext:
    """Rank `rank` of `size` that share each layer's weights. `group` is torch.distributed's, needed when size > 1."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.group is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. May be written into x."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension: [..., n] -> [..., size * n]."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def shard(self, total: int) -> range:
        """This rank's part of `total` equal items, which divide: shapes are checked before they get here."""
        assert total % self.size == 0
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)
