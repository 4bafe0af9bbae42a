"""L4, each rank: the bytes of every cached token's keys and values. Which slot holds what is the ledger's business.

Shapes: T slots, G key/value heads of this rank, C head_dim, N tokens.
"""

from __future__ import annotations

import torch


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
    ):
        shape = (num_layers, pool_tokens + page_size, num_kv_heads, head_dim)
        # Zeros, because a masked position still multiplies its V by 0, and whatever malloc left there may be NaN.
        self._k_TGC = list(torch.zeros(shape, dtype=dtype, device=device))
        self._v_TGC = list(torch.zeros(shape, dtype=dtype, device=device))

    def store(self, layer: int, slots_N: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor) -> None:
        k_TGC, v_TGC = self._k_TGC[layer], self._v_TGC[layer]
        k_TGC.index_copy_(0, slots_N, k_NGC.to(k_TGC.dtype))
        v_TGC.index_copy_(0, slots_N, v_NGC.to(v_TGC.dtype))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all slots, each [T, G, C]."""
        return self._k_TGC[layer], self._v_TGC[layer]
