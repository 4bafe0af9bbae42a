"""L4, each rank: a model's weights as a stream of (name, tensor), whatever file they come from.

Names are Hugging Face's; every rank goes through the whole stream and keeps its share. Tensors come one at a time.
Those of safetensors are mapped, so that what a rank does not copy to its layers is not read; those of GGUF are
dequantized whole on every rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors import safe_open
from tqdm import tqdm

from srt import weight_names
from srt.gguf_files import GGUFTensor, read_gguf
from srt.model_config import ModelConfig
from srt.model_files import ModelFiles, safetensors_files

_DUMMY_STD = 0.02
_DUMMY_BLOCK = (1 << 20) + 7  # elements drawn per tensor and repeated; odd, so that rows do not repeat in step


def iterate_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    progress: bool = False,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `weight_names.weight_shapes`, each once, in the file's order.

    `seed` is of dummy weights: the same seed gives a tensor the same values wherever it comes in the order. They are
    drawn as `dtype` on `device`, as the model will have them. What is read from files comes on the CPU, from
    safetensors in the file's type, from GGUF as float32.
    """
    shapes = weight_names.weight_shapes(files.model_config)
    if files.weights == "dummy":
        stream = _dummy(shapes, seed, dtype, device or torch.device("cpu"))
    elif files.weights == "gguf":
        assert files.gguf_path is not None
        stream = _gguf(files.gguf_path, files.model_config)
    else:
        stream = _safetensors(safetensors_files(files.folder), shapes.keys())
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    with tqdm(
        desc="loading weights",
        total=elements * dtype.itemsize,
        unit="B",
        unit_scale=True,
        file=_Stderr(),
        dynamic_ncols=True,
        disable=not progress,
    ) as bar:
        for name, tensor in stream:
            assert tuple(tensor.shape) == shapes[name]
            yield name, tensor
            bar.update(tensor.numel() * dtype.itemsize)


class _Stderr:
    """Standard error, without what it does not take: a model can be loaded though nobody sees how."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def _safetensors(paths: list[Path], names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in names:
                    yield name, file.get_tensor(name)


def _gguf(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    gguf = read_gguf(path)
    # llama.cpp's llama rotates neighbouring elements where Hugging Face's rotates the halves of a head.
    permuted = gguf.metadata["general.architecture"] == "llama"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    data = np.memmap(path, np.uint8, "r")

    def load(tensor: GGUFTensor) -> torch.Tensor:
        values = dequantize(data, tensor)
        part = tensor.name.split(".")[-2]
        if permuted and part in heads:
            values = unpermute(values, heads[part])
        return torch.from_numpy(values)

    named = {weight_names.from_gguf(tensor.name): tensor for tensor in gguf.tensors.values()}
    named.pop(None, None)
    return zip(named, _ahead(load, named.values()), strict=True)


def _ahead(load: Callable[[GGUFTensor], torch.Tensor], tensors: Iterable[GGUFTensor]) -> Iterator[torch.Tensor]:
    """Loads a few tensors ahead, each on a core of its own: numpy lets go of the GIL while it computes."""
    workers = min(8, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[torch.Tensor]] = deque()
        for tensor in tensors:
            pending.append(pool.submit(load, tensor))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def dequantize(data: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """`data` is the file's bytes. Float32 in the tensor's shape, in memory of its own."""
    stored = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
    kind = GGMLQuantizationType(tensor.type_id)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        values = stored.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
        return np.array(values, np.float32)
    return np.ascontiguousarray(quants.dequantize(stored, kind), np.float32)


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads * head_dim, ...]: pairs (2i, 2i + 1) of each head become (i, i + head_dim / 2)."""
    head_dim = values.shape[0] // num_heads
    pairs = values.reshape(num_heads, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _dummy(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes.items():
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
        count = int(np.prod(shape))
        block = torch.randn(min(count, _DUMMY_BLOCK), generator=generator, device=device) * _DUMMY_STD
        if name.endswith("norm.weight"):
            block += 1
        block = block.to(dtype)
        yield name, block.repeat(-(-count // len(block)))[:count].view(shape)
