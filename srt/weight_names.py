"""Shared: the names and shapes of the tensors that a model must bring, and what GGUF calls them. No torch.

Names are those of Hugging Face's checkpoints, shapes as torch has them. A model with a tensor missing or in another
shape is refused with this before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from srt.model_config import ModelConfig, ModelError

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint. A linear layer's weight is [outputs, inputs]."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        for name, outputs, inputs, bias in (
            ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q_size, config.output_bias),
            ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (outputs,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_weights(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ModelError unless every tensor is there, in its shape, and no weight or bias is left over."""
    if config.num_layers > len(found):  # it may be any number, and all their names would be written
        raise ModelError(f"{where} has {len(found)} tensors, too few for the {config.num_layers} layers of config.json")
    expected = weight_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where} lacks the tensor {name}, which config.json asks for")
        if tuple(found[name]) != shape:
            raise ModelError(f"{where}: {name} has shape {tuple(found[name])}, but config.json asks for {shape}")
    for name in found:
        if name not in expected and not is_redundant(name):
            raise ModelError(f"{where} has a tensor {name} that {config.architecture} does not use")


def is_redundant(name: str) -> bool:
    """True for tensors that follow from others: a tied output head, tables of rotary frequencies."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def from_gguf(name: str) -> str | None:
    """Hugging Face's name for a GGUF tensor; None for one that is no weight. Raises ModelError for an unknown one."""
    if name == "rope_freqs.weight":
        return None
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _GGUF_TOP:
            return f"{_GGUF_TOP[stem]}.{kind}"
        block, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        if block == "blk" and index.isdigit() and part in _GGUF_LAYER:
            return f"model.layers.{index}.{_GGUF_LAYER[part]}.{kind}"
    raise ModelError(f"the GGUF file has a tensor {name} that no supported architecture uses")
