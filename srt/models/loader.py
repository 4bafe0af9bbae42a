"""L4, each rank: builds a model and fills all its weights from a stream of named tensors, or says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from srt.layers.context import LayerContext
from srt.model_config import ModelConfig, ModelError
from srt.models import MODELS
from srt.models.llama import LlamaForCausalLM
from srt.parallel import ParallelContext
from srt.registry import UnknownName
from srt.weight_names import is_redundant, weight_shapes

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
    num_weights = sum(map(math.prod, weight_shapes(config).values()))
    context = LayerContext(dtype, device, parallel, spend_memory=num_weights * dtype.itemsize <= SMALL_MODEL)
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
        elif not is_redundant(name):
            unexpected.append(name)
    if missing:
        raise ModelError(f"the checkpoint lacks {listed(list(missing))}, which {config.architecture} needs")
    if unexpected:
        raise ModelError(f"the checkpoint has {listed(unexpected)}, which {config.architecture} has no place for")


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} " + ", ".join(names[:SHOWN]) + more


def check_split(config: ModelConfig, size: int) -> None:
    """Raises ModelError unless heads and feed-forward features divide among `size` ranks."""
    if not config.splits_into(size):
        raise ModelError(
            f"--tp-size {size} does not divide the model's {config.num_heads} heads, {config.num_kv_heads} key/value "
            f"heads and {config.intermediate_size} feed-forward features; take a common divisor"
        )
