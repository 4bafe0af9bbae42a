"""L4, each rank: which device and which types a configuration means."""

from __future__ import annotations

import torch

from srt.config import ServerConfig
from srt.executor.memory_plan import available_ram, own_ram
from srt.model_config import ModelError


def resolve_device(config: ServerConfig) -> torch.device:
    if config.device == "cuda":
        raise ModelError("this version serves on the CPU only: pass --device cpu")
    return torch.device("cpu")


def resolve_dtype(config: ServerConfig) -> torch.dtype:
    """Of weights and K/V."""
    return getattr(torch, config.dtype)


def free_memory(device: torch.device) -> int:
    """Bytes that weights and pool could still take."""
    assert device.type == "cpu"
    return available_ram()


def held_memory(device: torch.device) -> int:
    """Bytes that this process has taken. Its growth is what was loaded, whatever others take or free meanwhile."""
    assert device.type == "cpu"
    return own_ram()
