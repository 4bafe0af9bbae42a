"""L4, each rank: builds a model and fills all its weights from a stream of named tensors, or says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from srt.layers.context import LayerContext
from srt.model_config import ModelConfig, ModelError
from srt.models import MODELS
from srt.models.llama import LlamaForCausalLM
from srt.parallel import ParallelContext
from srt.registry import UnknownName

SHOWN = 5

SMALL_MODEL = 2**31
"""Bytes of weights up to which a second layout of them is cheap."""


def load_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    context_length: int | None = None,
    parallel: ParallelContext | None = None,
) -> LlamaForCausalLM:
    """`weights` gives Hugging Face's names and full, unsharded tensors in any order and any float type.

    `context_length` bounds the positions of a request; the model's own limit if not given. Raises ModelError, by name,
    for a tensor that is missing, unexpected or wrongly shaped, and for an architecture or a split we cannot serve.
    """
    parallel = parallel or ParallelContext()
    check_split(config, parallel.size)
    try:
        architecture = MODELS.load(config.architecture)
    except UnknownName as error:
        raise ModelError(str(error)) from None
    context = LayerContext(dtype, device, parallel, spend_memory=num_weights(config) * dtype.itemsize <= SMALL_MODEL)
    with torch.inference_mode():
        model = architecture(context, config, context_length or config.max_position_embeddings)
        fill(model, config, weights)
        model.pack()
    return model


def fill(model: LlamaForCausalLM, config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    missing = dict(model.weight_slots())
    filled: set[str] = set()
    unexpected: list[str] = []
    for name, tensor in weights:
        slot = missing.pop(name, None)
        if slot is not None:
            if tuple(tensor.shape) != slot.shape:
                raise ModelError(
                    f"tensor {name} has shape {list(tensor.shape)}, but config.json implies {list(slot.shape)}"
                )
            slot.fill(tensor)
            filled.add(name)
        elif name in filled:
            raise ModelError(f"tensor {name} appears twice in the checkpoint")
        elif not derived(name, config):
            unexpected.append(name)
    if missing:
        raise ModelError(f"the checkpoint lacks {listed(list(missing))}, which {config.architecture} needs")
    if unexpected:
        raise ModelError(f"the checkpoint has {listed(unexpected)}, which {config.architecture} has no place for")


def derived(name: str, config: ModelConfig) -> bool:
    """Tensors some checkpoints store although the config determines them: rotary tables, and a tied head's copy."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} " + ", ".join(names[:SHOWN]) + more


def num_weights(config: ModelConfig) -> int:
    """Of the matrices, to a few per cent."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + feed_forward) + vocabulary


def check_split(config: ModelConfig, size: int) -> None:
    """Raises ModelError unless heads and feed-forward features divide among `size` ranks."""
    kv_heads_divide = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    if config.num_heads % size or config.intermediate_size % size or not kv_heads_divide:
        raise ModelError(
            f"--tp-size {size} does not divide the model's {config.num_heads} heads, {config.num_kv_heads} key/value "
            f"heads and {config.intermediate_size} feed-forward features; take a common divisor"
        )
