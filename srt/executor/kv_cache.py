"""L4, each rank: the bytes of every cached token's keys and values. Which slot holds what is the ledger's business.

Shapes: T slots, G key/value heads of this rank, S = 2 G keys and values, C head_dim, N tokens.
"""

from __future__ import annotations

import math

import torch

from srt.kernels import cpu, huge_pages
from srt.scheduler.schedule_batch import Copies


class KVCache:
    """K and V per layer. Slots [0, page_size) are the spare page: nobody's, always finite, safe to read as padding."""

    def __init__(
        self,
        *,
        num_layers: int,
        pool_tokens: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        host_tokens: int = 0,
    ):
        shape = (num_layers, pool_tokens + page_size, 2 * num_kv_heads, head_dim)
        self.head_dim = head_dim
        self._kv_TSC = list(zeros(shape, dtype, device))
        host_shape = (num_layers, host_tokens + page_size if host_tokens else 0, *shape[2:])
        self._host_TSC = list(zeros(host_shape, dtype, device))

    def store(self, layer: int, slots_N: torch.Tensor, kv_NSC: torch.Tensor) -> None:
        """`kv_NSC` holds each token's G keys, then its G values. What is too large, or no number, may change in it."""
        kv_TSC = self._kv_TSC[layer]
        if cpu.serves(kv_TSC.device, self.head_dim):
            cpu.store(kv_TSC, slots_N, kv_NSC)
        else:
            # As `cpu.store`, whose source says why; in place, since the first chunk of a prompt attends to these.
            most = min(torch.finfo(kv_TSC.dtype).max, 2.0**64)
            kv_NSC.nan_to_num_(most).clamp_(-most, most)
            kv_TSC.index_copy_(0, slots_N, kv_NSC.to(kv_TSC.dtype))

    def copy(self, copies: Copies) -> None:
        """Between the pool and what stands for host memory: on a CPU one is as good as the other."""
        saved_from, saved_to, loaded_from, loaded_to = map(torch.from_numpy, copies)
        for kv_TSC, host_TSC in zip(self._kv_TSC, self._host_TSC, strict=True):
            host_TSC[saved_to] = kv_TSC[saved_from]
            kv_TSC[loaded_to] = host_TSC[loaded_from]

    def layer(self, layer: int) -> torch.Tensor:
        """Keys and values of all slots side by side, [T, 2 G, C]: a token's lie together, so one copy stores both."""
        return self._kv_TSC[layer]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a masked position still multiplies its V by 0, and what lay in the memory before may be NaN.

    On a CPU they take no room until they are used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_pages.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
