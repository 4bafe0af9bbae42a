"""L4, each rank: the self-attention block around whatever computes attention over the paged K/V.

Shapes: N tokens, D hidden size, H query heads and G key/value heads of this rank, S heads of queries, keys and values
or of some of these, C head_dim, E = H · C, P positions, F = C / 2.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from srt.layers.context import LayerContext, WeightSlots, under
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from srt.layers.rotary_embedding import rotate_
from srt.model_config import ModelConfig
from srt.parallel import ParallelContext


class Attend(Protocol):
    """Attention of one step's tokens, bound to that step."""

    def __call__(self, layer: int, q_NHC: torch.Tensor, kv_NSC: torch.Tensor) -> torch.Tensor:
        """Stores each token's G keys and G values, which lie in this order in `kv_NSC`; then every query sees its
        request's positions up to its own -> [N, H, C]."""


class FusedAttend(Protocol):
    """The same on a GPU, where one kernel normalises, turns and stores what comes out of the projection."""

    def __call__(
        self, layer: int, qkv_NSC: torch.Tensor, turns_P2F: torch.Tensor, norms: QKNorms | None
    ) -> torch.Tensor:
        """`qkv_NSC` holds each token's H queries, G keys and G values -> [N, H, C]."""


class QKNorms(NamedTuple):
    q_weight_C: torch.Tensor
    k_weight_C: torch.Tensor
    eps: float


class Attention:
    """Grouped-query attention, config-driven: biases, and normalised queries and keys (`qk_norm`)."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int):
        self._layer = layer
        self._on_gpu = context.on_gpu
        self._head_dim = config.head_dim
        heads = context.parallel.shard(config.num_heads)
        kv_heads = kv_head_range(context.parallel, config.num_kv_heads)
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        parts = {
            "q_proj": self._features(config.num_heads, heads),
            "k_proj": self._features(config.num_kv_heads, kv_heads),
            "v_proj": self._features(config.num_kv_heads, kv_heads),
        }
        rotary_dims = {"q_proj": config.head_dim, "k_proj": config.head_dim}
        self._qkv = ColumnParallelLinear(context, config.hidden_size, parts, config.qkv_bias, rotary_dims)
        self._output = RowParallelLinear(
            context, "o_proj", config.num_heads * config.head_dim, config.hidden_size, config.output_bias
        )
        self._qk_norms = {
            name: RMSNorm(context, config.head_dim, config.rms_norm_eps, rotary_dim=config.head_dim)
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        }

    def _features(self, total: int, heads: range) -> tuple[int, range]:
        return total * self._head_dim, range(heads.start * self._head_dim, heads.stop * self._head_dim)

    def weight_slots(self) -> WeightSlots:
        yield from self._qkv.weight_slots()
        yield from self._output.weight_slots()
        for name, norm in self._qk_norms.items():
            yield from under(f"{name}.", norm.weight_slots())

    def pack(self) -> None:
        self._qkv.pack()
        self._output.pack()
        for norm in self._qk_norms.values():
            norm.pack()

    def __call__(
        self,
        norm: RMSNorm,
        x_ND: torch.Tensor | None,
        residual_ND: torch.Tensor,
        turns: torch.Tensor,
        attend: Attend | FusedAttend,
    ) -> torch.Tensor:
        """Adds `x_ND`, if there is one, to the residual stream in place and attends to the norm of that -> [N, E]."""
        num_tokens = len(residual_ND)
        qkv_NSC = self._qkv.of_normed(norm, x_ND, residual_ND).view(num_tokens, -1, self._head_dim)
        if self._on_gpu:
            o_NHC = attend(self._layer, qkv_NSC, turns, self._norms)
        else:
            o_NHC = self._attend_in_steps(qkv_NSC, turns, attend)
        return o_NHC.reshape(num_tokens, -1)

    def project(self, o_NE: torch.Tensor, residual_ND: torch.Tensor) -> torch.Tensor | None:
        """Adds the projection of what all heads gave to the stream, or returns it for the norm behind to add."""
        return self._output.onto(residual_ND, o_NE)

    @property
    def _norms(self) -> QKNorms | None:
        if not self._qk_norms:
            return None
        q_norm, k_norm = self._qk_norms["q_norm"], self._qk_norms["k_norm"]
        return QKNorms(q_norm.weight_D, k_norm.weight_D, q_norm.eps)

    def _attend_in_steps(self, qkv_NSC: torch.Tensor, turns_N1F: torch.Tensor, attend: Attend) -> torch.Tensor:
        num_heads = self._num_heads
        num_rotated = num_heads + self._num_kv_heads
        if self._qk_norms:
            qkv_NSC[:, :num_heads] = self._qk_norms["q_norm"](qkv_NSC[:, :num_heads])
            qkv_NSC[:, num_heads:num_rotated] = self._qk_norms["k_norm"](qkv_NSC[:, num_heads:num_rotated])
        rotate_(qkv_NSC[:, :num_rotated], turns_N1F)
        return attend(self._layer, qkv_NSC[:, :num_heads], qkv_NSC[:, num_heads:])


def kv_head_range(parallel: ParallelContext, num_kv_heads: int) -> range:
    """This rank's key/value heads. With more ranks than heads, neighbours hold copies of one head."""
    if parallel.size <= num_kv_heads:
        return parallel.shard(num_kv_heads)
    assert parallel.size % num_kv_heads == 0
    head = parallel.rank * num_kv_heads // parallel.size
    return range(head, head + 1)
