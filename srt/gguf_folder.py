"""Shared: turns a GGUF file's metadata into the files of a Hugging Face folder, once. No torch, no weights.

Everything after it (shapes, tokenizer, chat template) reads that folder and never asks where it came from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from srt.gguf_files import GGUFFile
from srt.gguf_tokenizer import adds_bos, special_token, tokenizer_json
from srt.model_config import ModelError

# GGUF's general.architecture -> Hugging Face's (architecture, model_type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Tokens that end a turn in well-known chat formats, though a file may name only the end of a document as EOS.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>")


def folder_files(gguf: GGUFFile) -> dict[str, dict[str, Any]]:
    """File name -> JSON object. Raises ModelError for what could not be carried over exactly."""
    metadata = gguf.metadata
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{gguf.path} is one part of a split GGUF; merge the parts with llama-gguf-split first")
    tokenizer = tokenizer_json(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: special_token(metadata, name) for name in ("bos", "eos", "eot", "unknown", "padding")}
    ends = [ids["eos"], ids["eot"], *(tokens.index(token) for token in END_OF_TURN if token in tokens)]
    end_ids = list(dict.fromkeys(index for index in ends if index is not None))
    special = {"bos_token_id": ids["bos"], "eos_token_id": end_ids}
    template = _chat_template(metadata)
    return {
        "config.json": {**_shapes(gguf), **special},
        "generation_config.json": special,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": adds_bos(metadata),
            "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            "clean_up_tokenization_spaces": False,
            **{
                f"{key}_token": tokens[ids[name]]
                for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
                if ids[name] is not None
            },
            **({"chat_template": template} if template else {}),
        },
    }


def _chat_template(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """As in tokenizer_config.json: one template, or a list of named ones."""
    default, others = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates", [])
    if not default or not others:
        return default
    named = {"default": default, **{name: metadata[f"tokenizer.chat_template.{name}"] for name in others}}
    return [{"name": name, "template": template} for name, template in named.items()]


def _shapes(gguf: GGUFFile) -> dict[str, Any]:
    metadata, tensors = gguf.metadata, gguf.tensors
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{gguf.path}: architecture {name!r} is not supported; {', '.join(ARCHITECTURES)} are")
    architecture, model_type = ARCHITECTURES[name]

    def value(key: str, default: float | None = None) -> Any:
        found = metadata.get(f"{name}.{key}", default)
        if not isinstance(found, int | float) or found <= 0:
            raise ModelError(f"{gguf.path}: {name}.{key} must be one positive number, not {found!r}")
        return found

    if metadata.get(f"{name}.expert_count", 0):
        raise ModelError(f"{gguf.path}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{gguf.path} has no token embedding: it holds a vocabulary, an adapter or a part of a model")
    num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ModelError(f"{gguf.path}: {name}.{key} must be the head dimension {head_dim}, not {value(key)}")
    context = value("context_length")
    theta = value("rope.freq_base", 10000.0)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, name, head_dim, theta, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors and name != "qwen2",
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "torch_dtype": {0: "float32", 1: "float16"}.get(tensors["token_embd.weight"].type_id, "bfloat16"),
    }


def _rope_scaling(gguf: GGUFFile, name: str, head_dim: int, theta: float, context: int) -> dict[str, Any] | None:
    metadata = gguf.metadata
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, head_dim, theta)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{gguf.path}: rope scaling {kind!r} is not supported; linear, yarn and llama3 are")
    scaling = {"rope_type": kind, "factor": metadata.get(f"{name}.rope.scaling.factor", 1.0)}
    original = metadata.get(f"{name}.rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """GGUF stores Llama 3's scaling as one divisor per frequency; finds the parameters that give these divisors."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type_id != 0 or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path}: rope_freqs.weight has an unknown layout")
    stored = np.fromfile(gguf.path, "<f4", head_dim // 2, offset=tensor.offset)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    divisors = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    divisors = np.where(smooth < 0, scaling["factor"], np.where(smooth > 1, 1.0, divisors))
    if not np.allclose(stored, divisors, rtol=1e-4):
        raise ModelError(f"{gguf.path}: rope_freqs.weight does not follow Llama 3's rope scaling")
    return scaling
