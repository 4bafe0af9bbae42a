"""The default model in transformers, float32, its weights read from the GGUF file by rules of the test's own.

transformers' own GGUF loader takes over a minute for this file, nearly all of it for the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import torch
import transformers

from srt.model_files import ModelFiles

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 9, 3, 64
NUM_THREADS = 2


def load(files: ModelFiles) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {}
    for tensor in gguf.GGUFReader(files.gguf_path).tensors:
        *block, name, kind = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):  # llama.cpp has the two halves of a rotated pair side by side
            values = values.reshape(-1, HEAD_DIM // 2, 2, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{NAMES[name]}.{kind}"] = torch.tensor(values, dtype=torch.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are no weights
    return model.eval()


@dataclass(frozen=True)
class Continuation:
    """Greedy output of one prompt."""

    ids: list[int]
    logprobs: list[float]  # of `ids`, natural logarithms
    gaps: list[float]  # between the two best logits


def greedy(model: transformers.LlamaForCausalLM, prompts: list[list[int]], steps: int) -> list[Continuation]:
    """All prompts in one batch, shorter ones padded on the left."""
    torch.set_num_threads(NUM_THREADS)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    continuations = []
    for row in range(len(prompts)):
        tokens = output.sequences[row, width:].tolist()
        logits = torch.stack([step[row] for step in output.logits])
        logprobs = logits.log_softmax(1)[range(steps), tokens].tolist()
        best = logits.topk(2).values
        continuations.append(Continuation(tokens, logprobs, (best[:, 0] - best[:, 1]).tolist()))
    return continuations
