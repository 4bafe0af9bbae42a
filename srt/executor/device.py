"""L4, each rank: which device and which types a configuration means."""

from __future__ import annotations

import torch

from srt.config import ServerConfig
from srt.executor.memory_plan import available_ram, own_ram
from srt.layers.cpu_linear import multiplies_bfloat16
from srt.model_config import ModelConfig, ModelError


def resolve_device(config: ServerConfig) -> torch.device:
    if config.device == "cuda":
        raise ModelError("this version serves on the CPU only: pass --device cpu")
    return torch.device("cpu")


def resolve_dtype(config: ServerConfig, model_config: ModelConfig) -> torch.dtype:
    """Of weights and K/V. A CPU decodes as fast as it reads its weights, so auto takes two bytes: bfloat16 if the
    checkpoint has it or the CPU multiplies it, else float16, which loses less."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if model_config.dtype == "bfloat16" or multiplies_bfloat16() else torch.float16


def free_memory(device: torch.device) -> int:
    """Bytes that weights and pool could still take."""
    assert device.type == "cpu"
    return available_ram()


def held_memory(device: torch.device) -> int:
    """Bytes that this process has taken. Its growth is what was loaded, whatever others take or free meanwhile."""
    assert device.type == "cpu"
    return own_ram()
