"""Shared by frontend, scheduler and detokenizer: the bytes that each token stands for. No torch, no transformers.

The table follows the decoder that tokenizer.json describes. Decoding ids one by one would not give it: decoders
drop the first space of a text and replace bytes that are not whole characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from srt.model_config import ModelError

DECODERS = ("ByteLevel", "Metaspace", "Sequence of Replace, ByteFallback, Fuse, Strip and Metaspace")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that exist, by id."""

    table: Sequence[bytes]
    is_special: Sequence[int]
    eos_token_ids: Sequence[int]  # in the table
    encode: Callable[[str], list[int]]  # text to ids; special tokens written out in it are but text


class TokenBytes:
    """`table[id]` is b"" for an id that stands for nothing. Ids beyond the table decode to nothing as well."""

    def __init__(self, table: list[bytes], is_special: bytes, strips_leading_space: bool) -> None:
        assert len(table) == len(is_special)
        self.table = table
        self.is_special = is_special  # one byte per id, 1 for tokens that clients do not see by default
        self.strips_leading_space = strips_leading_space  # a decoder's first token of a text loses one space

    @classmethod
    def from_folder(cls, folder: Path) -> TokenBytes:
        return cls.from_tokenizer_json(read_tokenizer_json(folder))

    @classmethod
    def from_tokenizer_json(cls, tokenizer: dict[str, Any]) -> TokenBytes:
        """Raises ModelError for a decoder whose bytes we do not know."""
        vocabulary = _vocabulary(tokenizer["model"])
        added = tokenizer.get("added_tokens") or []
        size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
        table = [b""] * size
        special = bytearray(size)
        decoder = _Decoder(tokenizer.get("decoder"))
        for token, index in vocabulary.items():
            table[index] = decoder.bytes_of(token)
        for token in added:
            table[token["id"]] = token["content"].encode("utf-8")
            special[token["id"]] = bool(token.get("special", False))
        return cls(table, bytes(special), decoder.strips_leading_space)

    def decode(self, ids: Iterable[int], skip_special: bool) -> bytes:
        """The bytes of the tokens in a row, not necessarily whole characters, the first space of a text included."""
        table, is_special, size = self.table, self.is_special, len(self.table)
        return b"".join(
            [table[index] for index in ids if 0 <= index < size and not (skip_special and is_special[index])]
        )


def read_tokenizer_json(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    try:
        contents = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(contents, dict) or not isinstance(contents.get("model"), dict):
        raise ModelError(f"{path} does not describe a tokenizer")
    return contents


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return vocabulary
    if isinstance(vocabulary, list):  # a Unigram model's [piece, score] pairs
        return {piece: index for index, (piece, _) in enumerate(vocabulary)}
    raise ModelError(f"tokenizer.json: the model {model.get('type')!r} has no vocabulary")


def _byte_level_alphabet() -> dict[int, int]:
    """For str.translate: code point -> byte. Code points outside the alphabet go where Latin-1 cannot encode them.

    Byte-level BPE writes printable Latin-1 bytes as themselves and the others from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFD) | {0x100 + index: byte for index, byte in enumerate(others)}


class _Decoder:
    """What tokenizer.json's decoder does to one token."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self.byte_level: dict[int, int] | None = None
        self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.strips_leading_space = False
        steps = (spec or {}).get("decoders", []) if (spec or {}).get("type") == "Sequence" else [spec or {}]
        for step in steps:
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self.byte_level = _byte_level_alphabet()
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Fuse":
            pass
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step.get("content") == " " and step.get("stop") == 0 and step.get("start") in (0, 1):
            self.strips_leading_space |= step["start"] == 1
        elif kind == "Metaspace":
            self.replacements.append((step.get("replacement", "▁"), " "))
            self.strips_leading_space |= step.get("prepend_scheme", "always") != "never"
        else:
            raise ModelError(f"tokenizer.json: the decoder {kind!r} is not supported; supported are {DECODERS}")

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level is not None:
            try:
                return token.translate(self.byte_level).encode("latin-1")
            except UnicodeEncodeError:  # like the decoder, take a token outside the alphabet as it is written
                return token.encode("utf-8")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")
