"""Tiny random models of each family, in transformers and in ours, from the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from srt.model_config import ModelConfig, RopeScaling

ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}

VOCAB = 199


def hf_model(family: str, *, rope: str = "default", tied: bool = False, **extra: Any) -> transformers.PreTrainedModel:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    } | FAMILIES[family]
    if ROPES[rope] is not None:
        settings["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    settings |= extra
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def our_config(model: transformers.PreTrainedModel) -> ModelConfig:
    """Written out here, apart from `ModelConfig.from_hf`, so that the two are not tested by each other."""
    hf = model.config
    rope = dict(hf.rope_parameters)
    theta = rope.pop("rope_theta")
    biased = getattr(hf, "attention_bias", False)
    return ModelConfig(
        architecture=type(model).__name__,
        model_type=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim if getattr(hf, "head_dim", None) else hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=RopeScaling(**rope),
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=biased or hf.model_type == "qwen2",
        output_bias=biased,
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=hf.model_type == "qwen3",
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )
