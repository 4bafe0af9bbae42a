"""Shared: what a model is, as plain numbers. No torch, no file access.

`ModelConfig.from_hf` reads the dictionaries of config.json and generation_config.json; a GGUF file is first turned into
the same dictionaries (`srt/gguf_folder.py`), so there is one reader of shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class ModelError(Exception):
    """A model that cannot be served, with one sentence that says why and what would do."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions stretch past the trained context. `rope_type` is one of ROPE_TYPES."""

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0: the model's max_position_embeddings
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # the name in config.json's `architectures`, the key of the model registry
    model_type: str
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's vocabulary
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # the checkpoint's: "float32", "float16" or "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of every layer, in elements."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_elements_per_rank(self, num_ranks: int) -> int:
        """Those of a token that one of `num_ranks` ranks stores: with more ranks than KV heads each stores one head."""
        return self.kv_elements_per_token // self.num_kv_heads * max(1, self.num_kv_heads // num_ranks)

    def splits_into(self, num_ranks: int) -> bool:
        """Whether heads and feed-forward features divide among ranks; more ranks than KV heads share each of them."""
        kv_heads_divide = self.num_kv_heads % num_ranks == 0 or num_ranks % self.num_kv_heads == 0
        return self.num_heads % num_ranks == 0 and self.intermediate_size % num_ranks == 0 and kv_heads_divide

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Raises ModelError for what we would otherwise get wrong in silence."""
        architecture = _architecture(config)
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"config.json: weights quantized with {method!r} are not supported; "
                "serve the unquantized checkpoint or a GGUF file"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; only silu is")
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
            )
        hidden_size = _positive_int(config, "hidden_size")
        trained_context = _positive_int(config, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(config, trained_context)
        attention_bias = bool(config.get("attention_bias", False))
        generation_config = generation_config or {}
        eos = [*_token_ids(generation_config, "eos_token_id"), *_token_ids(config, "eos_token_id")]
        bos = [*_token_ids(generation_config, "bos_token_id"), *_token_ids(config, "bos_token_id")]
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ModelError(f"config.json: dtype {dtype!r} is not supported; only float32, float16 and bfloat16 are")
        return cls(
            architecture=architecture,
            model_type=str(config.get("model_type", "")),
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=_positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_positive_int(config, "head_dim", hidden_size // num_heads),
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_usable_context(architecture, config, trained_context, rope_scaling),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=dtype,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"config.json: architectures must be a list of names, not {names!r}")
    for name in names:
        if name in ARCHITECTURES:
            return name
    found = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r} without `architectures`"
    raise ModelError(f"config.json: {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _positive_float(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _token_ids(config: dict[str, Any], key: str) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise ModelError(f"{key} must be a token id or a list of token ids, not {value!r}")
    return values


def _rope(config: dict[str, Any], trained_context: int) -> tuple[float, RopeScaling]:
    """Reads `rope_parameters` (theta and scaling in one object) or the older `rope_theta` beside `rope_scaling`.

    Where a config has both, somebody has added `rope_scaling` to stretch the context: it decides, as in transformers.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    for given in (parameters, scaling):
        if not isinstance(given, dict):
            raise ModelError(f"config.json: rope_scaling must be an object, not {given!r}")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError("config.json: rope parameters of their own for kinds of layers are not supported")
    theta = _positive_float({**config, **parameters, **scaling}, "rope_theta", 10000.0)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ModelError(f"config.json: partial_rotary_factor {partial!r} is not supported; only 1 is")
    if rope_type == "default":
        return theta, RopeScaling(original_max_position_embeddings=trained_context)
    optional = {
        key: _positive_float(scaling, key)
        for key in (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        if scaling.get(key) is not None
    }
    if rope_type == "llama3":
        missing = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} - scaling.keys()
        if missing:
            raise ModelError(f"config.json: rope type 'llama3' lacks {', '.join(sorted(missing))}")
    return theta, RopeScaling(
        rope_type=rope_type,
        factor=_positive_float(scaling, "factor"),
        original_max_position_embeddings=_positive_int(scaling, "original_max_position_embeddings", trained_context),
        truncate=bool(scaling.get("truncate", True)),
        **optional,
    )


def _usable_context(architecture: str, config: dict[str, Any], trained_context: int, scaling: RopeScaling) -> int:
    """The most tokens the model attends to as it was trained to.

    Linear, dynamic and yarn scaling stretch the original context by their factor, whether or not
    `max_position_embeddings` was raised with it. Within its sliding window a model attends like one without.
    """
    context = trained_context
    if scaling.rope_type in ("linear", "dynamic", "yarn"):
        context = max(context, int(scaling.original_max_position_embeddings * scaling.factor))
    windowed = {
        "MistralForCausalLM": config.get("sliding_window") is not None,
        "Qwen2ForCausalLM": bool(config.get("use_sliding_window", False)),
        "Qwen3ForCausalLM": bool(config.get("use_sliding_window", False)),
    }
    if not windowed.get(architecture, False):
        return context
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return context
    return min(context, _positive_int(config, "sliding_window"))
