"""Shared: reads a GGUF file's metadata and where its tensors lie. No torch, no tensor data.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader wraps every string
of a vocabulary in arrays of its own, which takes seconds a start; this one takes a tenth of a second.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srt.model_config import ModelError

# ggml's type number -> (name, elements per block, bytes per block): the types that `gguf.quants` can turn into floats.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # as torch has it: the dimension whose elements lie side by side comes last
    type_id: int  # a key of TENSOR_TYPES
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # arrays of numbers as numpy arrays, of strings as lists
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Raises ModelError for a file that is not GGUF, is cut off, or holds a tensor type that we cannot read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self.position = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; 2 and 3 are (little-endian)")
        num_tensors, num_entries = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_entries):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {name: self.tensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        return GGUFFile(self.path, metadata, tensors)

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.cut_off()
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def cut_off(self) -> ModelError:
        return ModelError(
            f"{self.path} is cut off or damaged: it ends at byte {len(self.data)}, before its contents do"
        )

    def scalar(self, code: str) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return float(str(np.float32(value))) if code == "f" else value  # 1e-05, not its nearest binary32

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise ModelError(f"{self.path}: metadata is nested too deep")
            item_kind, length = self.scalar("I"), self.scalar("Q")
            if item_kind in _SCALARS:
                dtype = np.dtype(_SCALARS[item_kind]).newbyteorder("<")
                return np.frombuffer(self.take(length * dtype.itemsize), dtype)
            if item_kind == _STRING:
                return self.strings(length)
            return [self.value(item_kind, depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands of them, so this loop makes no calls that it can spare."""
        data, position, size = self.data, self.position, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if position + 8 > size:
                raise self.cut_off()
            end = position + 8 + unpack(data, position)[0]
            if end > size:
                raise self.cut_off()
            strings.append(data[position + 8 : end].decode("utf-8"))
            position = end
        self.position = position
        return strings

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        if type_id not in TENSOR_TYPES:
            supported = ", ".join(kind[0] for kind in TENSOR_TYPES.values())
            raise ModelError(f"{self.path}: {name} has ggml's tensor type {type_id}; supported are {supported}")
        kind, block_elements, block_bytes = TENSOR_TYPES[type_id]
        count = 1
        for size in shape:
            count *= size
        if not shape or shape[-1] % block_elements:
            raise ModelError(f"{self.path}: {name} of shape {shape} cannot be stored as {kind}")
        num_bytes = count // block_elements * block_bytes
        if offset + num_bytes > len(self.data):
            raise self.cut_off()
        return GGUFTensor(name, shape, type_id, offset, num_bytes)
