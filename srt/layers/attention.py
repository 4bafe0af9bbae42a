"""L4, each rank: the self-attention block around whatever computes attention over the paged K/V.

Shapes: N tokens, D hidden size, H query heads and G key/value heads of this rank, C head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from srt.layers.context import LayerContext, WeightSlots, under
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from srt.layers.rotary_embedding import rotate
from srt.model_config import ModelConfig


class Attend(Protocol):
    """Attention of one step's tokens, bound to that step."""

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor) -> torch.Tensor:
        """Stores K and V in the pool; then every query sees its request's positions up to its own -> [N, H, C]."""


class Attention:
    """Grouped-query attention, config-driven: biases, and normalised queries and keys (`qk_norm`)."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int):
        self._layer = layer
        self._head_dim = config.head_dim
        heads = context.parallel.shard(config.num_heads)
        kv_heads = kv_head_range(context, config.num_kv_heads)
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        parts = {
            "q_proj": self._features(config.num_heads, heads),
            "k_proj": self._features(config.num_kv_heads, kv_heads),
            "v_proj": self._features(config.num_kv_heads, kv_heads),
        }
        self._qkv = ColumnParallelLinear(context, config.hidden_size, parts, config.qkv_bias)
        self._output = RowParallelLinear(
            context, "o_proj", config.num_heads * config.head_dim, config.hidden_size, config.output_bias
        )
        self._q_norm = RMSNorm(context, config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self._k_norm = RMSNorm(context, config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def _features(self, total: int, heads: range) -> tuple[int, range]:
        return total * self._head_dim, range(heads.start * self._head_dim, heads.stop * self._head_dim)

    def weight_slots(self) -> WeightSlots:
        yield from self._qkv.weight_slots()
        yield from self._output.weight_slots()
        if self._q_norm is not None and self._k_norm is not None:
            yield from under("q_norm.", self._q_norm.weight_slots())
            yield from under("k_norm.", self._k_norm.weight_slots())

    def pack(self) -> None:
        self._qkv.pack()
        self._output.pack()

    def __call__(self, x_ND: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        num_tokens = len(x_ND)
        qkv_NSC = self._qkv(x_ND).view(num_tokens, -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        qk_NSC, v_NGC = qkv_NSC[:, :num_rotated], qkv_NSC[:, num_rotated:]
        if self._q_norm is not None and self._k_norm is not None:
            q_NHC, k_NGC = self._q_norm(qk_NSC[:, : self._num_heads]), self._k_norm(qk_NSC[:, self._num_heads :])
            qk_NSC = torch.cat((q_NHC, k_NGC), dim=1)
        qk_NSC = rotate(qk_NSC, angles)
        o_NHC = attend(self._layer, qk_NSC[:, : self._num_heads], qk_NSC[:, self._num_heads :], v_NGC)
        return self._output(o_NHC.reshape(num_tokens, -1))


def kv_head_range(context: LayerContext, num_kv_heads: int) -> range:
    """This rank's key/value heads. With more ranks than heads, neighbours hold copies of one head."""
    rank, size = context.parallel.rank, context.parallel.size
    if size <= num_kv_heads:
        return context.parallel.shard(num_kv_heads)
    assert size % num_kv_heads == 0
    head = rank * num_kv_heads // size
    return range(head, head + 1)
