"""Small checkpoints on disk, written by other hands than ours: transformers, tokenizers and the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a rose is a rose is a rose, said the fox to the rose 12 times",
    "größer, naïve, café, ΑΒΓ, привет, 日本語のテキスト",
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer(vocab_size: int = 320) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def hf_config(family: str, **extra: Any) -> transformers.PretrainedConfig:
    settings = {
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    if family == "qwen3":
        settings["head_dim"] = 48
    return transformers.AutoConfig.for_model(family, **(settings | extra))


def hf_folder(folder: Path, family: str = "llama", *, max_shard_size: str = "5GB", **extra: Any) -> dict[str, Any]:
    """Writes a checkpoint with random weights and returns the weights by name."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family, **extra))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    weights = dict(model.state_dict())
    if extra.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    return weights


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row what a converter to GGUF does for llama: (i, i + half) of each head become neighbours."""
    head_dim = len(weight) // num_heads
    rows = []
    for head in range(num_heads):
        for index in range(head_dim // 2):
            rows += [weight[head * head_dim + index], weight[head * head_dim + head_dim // 2 + index]]
    return np.stack(rows)


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_PARTS[part]}.{kind}"


def add_byte_level_vocabulary(writer: GGUFWriter, pre: str = "smollm") -> None:
    description = json.loads(byte_level_tokenizer().to_str())
    vocabulary = sorted(description["model"]["vocab"], key=description["model"]["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in description["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def gguf_file(
    path: Path,
    family: str = "llama",
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray] | None = None,
    pre: str = "smollm",
    **extra: Any,
) -> dict[str, np.ndarray]:
    """Writes a model of random weights and returns, by Hugging Face's names, the weights that the file stands for.

    `metadata` replaces or, where the value is None, removes entries; `tensors` are added as they are.
    """
    config = hf_config(family, **extra)
    torch.manual_seed(4)
    state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    writer = GGUFWriter(path, family)
    entries: dict[str, Any] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": 10000.0,
        **({f"{family}.attention.key_length": config.head_dim} if family == "qwen3" else {}),
        **(metadata or {}),
    }
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    add_byte_level_vocabulary(writer, pre)
    meant = {}
    for name, weight in state.items():
        values = torch.randn(weight.shape).numpy()
        if name in drop:
            continue
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        data = quants.quantize(values, stored)
        meant[name] = quants.dequantize(data, stored).reshape(values.shape)
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = permute(data, heads)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf.GGUFReader(path).tensors
    return meant
