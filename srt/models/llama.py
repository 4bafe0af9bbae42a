"""L4, each rank: Llama, Mistral, Qwen2 and Qwen3, stacks of pre-norm decoder layers with SwiGLU feed-forward blocks.

What they differ in is in the configuration: biases (`qkv_bias`, `output_bias`, `mlp_bias`), and queries and keys that
are normalised head by head (`qk_norm`).

Shapes: N tokens of a step, L those of them whose logits are wanted, D hidden size, E features of all heads,
V vocabulary.
"""

from __future__ import annotations

import copy

import torch

from srt.layers.attention import Attend, Attention, FusedAttend
from srt.layers.context import LayerContext, WeightSlots, under
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from srt.layers.rotary_embedding import RotaryEmbedding
from srt.model_config import ModelConfig


class FeedForward:
    def __init__(self, context: LayerContext, config: ModelConfig):
        part = (config.intermediate_size, context.parallel.shard(config.intermediate_size))
        parts = {"gate_proj": part, "up_proj": part}
        self._gate_up = ColumnParallelLinear(context, config.hidden_size, parts, config.mlp_bias)
        self._down = RowParallelLinear(
            context, "down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias
        )

    def weight_slots(self) -> WeightSlots:
        yield from self._gate_up.weight_slots()
        yield from self._down.weight_slots()

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, norm: RMSNorm, x_ND: torch.Tensor | None, residual_ND: torch.Tensor) -> torch.Tensor | None:
        """Adds `x_ND`, if there is one, to the residual stream in place; adds its own to it, or returns it."""
        return self._down.onto(residual_ND, self._gate_up.of_normed(norm, x_ND, residual_ND, gated=True))


class DecoderLayer:
    def __init__(self, context: LayerContext, config: ModelConfig, layer: int):
        self._attention = Attention(context, config, layer)
        self._feed_forward = FeedForward(context, config)
        self._attention_norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        self._feed_forward_norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    def weight_slots(self) -> WeightSlots:
        yield from under("self_attn.", self._attention.weight_slots())
        yield from under("mlp.", self._feed_forward.weight_slots())
        yield from under("input_layernorm.", self._attention_norm.weight_slots())
        yield from under("post_attention_layernorm.", self._feed_forward_norm.weight_slots())

    def pack(self) -> None:
        self._attention.pack()
        self._feed_forward.pack()
        self._attention_norm.pack()
        self._feed_forward_norm.pack()

    def attend(
        self, x_ND: torch.Tensor | None, residual_ND: torch.Tensor, turns: torch.Tensor, attend: Attend | FusedAttend
    ) -> torch.Tensor:
        """Adds `x_ND`, which the layer before may have left, to the residual stream in place -> [N, E]."""
        return self._attention(self._attention_norm, x_ND, residual_ND, turns, attend)

    def finish(self, o_NE: torch.Tensor, residual_ND: torch.Tensor) -> torch.Tensor | None:
        """Projection and feed-forward block, each token by itself. Adds to the residual stream; may leave a part."""
        x_ND = self._attention.project(o_NE, residual_ND)
        return self._feed_forward(self._feed_forward_norm, x_ND, residual_ND)


class LlamaForCausalLM:
    """`context_length` is the most positions a request may have."""

    def __init__(self, context: LayerContext, config: ModelConfig, context_length: int):
        self._embedding = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self._rotary = RotaryEmbedding(context, config, context_length)
        self._layers = [DecoderLayer(context, config, layer) for layer in range(config.num_layers)]
        self._norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        tied_to = self._embedding if config.tie_word_embeddings else None
        self.head = ParallelLMHead(context, config.vocab_size, config.hidden_size, tied_to)

    def weight_slots(self) -> WeightSlots:
        yield from under("model.embed_tokens.", self._embedding.weight_slots())
        for index, layer in enumerate(self._layers):
            yield from under(f"model.layers.{index}.", layer.weight_slots())
        yield from under("model.norm.", self._norm.weight_slots())
        yield from under("lm_head.", self.head.weight_slots())

    def pack(self) -> None:
        for layer in self._layers:
            layer.pack()
        self._norm.pack()
        self.head.pack()

    def first_layer(self) -> LlamaForCausalLM:
        """Itself with no layer but the first: it launches the same kernels, less often."""
        shorter = copy.copy(self)
        shorter._layers = self._layers[:1]
        return shorter

    def forward(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend | FusedAttend,
        wanted_L: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last layer's normalised hidden states [N, D], or those of the tokens `wanted_L` alone [L, D]."""
        return self.finish(*self.attend(ids_N, positions_N, attend), wanted_L)

    def attend(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend | FusedAttend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All up to the last layer's attention, which is the last that reads other tokens -> [N, E], [N, D]."""
        x_ND, residual_ND = None, self._embedding(ids_N)
        turns = self._rotary.at(positions_N)
        *others, last = self._layers
        for layer in others:
            x_ND = layer.finish(layer.attend(x_ND, residual_ND, turns, attend), residual_ND)
        return last.attend(x_ND, residual_ND, turns, attend), residual_ND

    def finish(self, o_NE: torch.Tensor, residual_ND: torch.Tensor, wanted_L: torch.Tensor | None) -> torch.Tensor:
        """`forward`'s result of what `attend` gave, for no more tokens than are wanted."""
        if wanted_L is not None:
            o_NE, residual_ND = o_NE[wanted_L], residual_ND[wanted_L]
        if len(residual_ND) == 0:
            return residual_ND
        return self._norm.of_sum(self._layers[-1].finish(o_NE, residual_ND), residual_ND)

    def logits(self, x_LD: torch.Tensor) -> torch.Tensor:
        """float32 [L, V]."""
        return self.head(x_LD)
