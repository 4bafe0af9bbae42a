"""A chat model of two layers whose tokens are bytes: small enough to be computed anew for every answer."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

PAIRS = ("Qu", "ZX", "WY", "KV", "JH", "BG", "FT", "MN", "RS", "é")
START, END = "<|im_start|>", "<|im_end|>"
PAIR = 256
IM_START = PAIR + len(PAIRS)
EOS = IM_START + 1
TABLE = [*(bytes([byte]) for byte in range(256)), *(pair.encode() for pair in PAIRS), START.encode(), END.encode()]
LIKELY = [*range(0x20, 0x7F), 0x0A, *"é€".encode(), *range(PAIR, EOS + 1)]
TEMPLATE = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> transformers.LlamaForCausalLM:
    """The model, in float32, and saved in the folder with its tokenizer. Its weights split into three."""
    _save_tokenizer(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(TABLE),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        unlikely = [token for token in range(len(TABLE)) if token not in LIKELY]
        model.lm_head.weight[unlikely] = 0.0  # so that most of a text can be read
        model.lm_head.weight[EOS] *= 1.3
    model.save_pretrained(folder)
    return model


def _save_tokenizer(folder: Path) -> None:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    merges = [tuple(letter[byte] for byte in pair.encode()) for pair in PAIRS]
    vocabulary = {letter[byte]: byte for byte in range(256)}
    vocabulary |= {"".join(merge): PAIR + i for i, merge in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
