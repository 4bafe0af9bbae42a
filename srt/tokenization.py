"""Shared by frontend and scheduler: text to token ids. No torch, no transformers.

`Tokenizer` wraps the `tokenizers` library; what a model adds around each text is found out once and then added here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from srt.model_config import ModelError
from srt.model_files import read_optional_json
from srt.token_bytes import TokenBytes, Vocabulary, read_tokenizer_json

# Spaces at either end and in rows, digits, line ends, accents, an emoji of several code points, scripts with and
# without spaces, combining marks, and characters that few vocabularies hold whole.
_CHECK_CORPUS = (
    "Hello, world!",
    " a  b   c ",
    "x\n\n3\t4\r\n",
    "don't 12345 [  3,   4]",
    "naïve café Ünïcödé",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "e\u0301 \u00a0\u3000\u2028 ▁ Ġ <0x41>",
    "\x00\x01\x7f𐍈",
)


class Tokenizer:
    """One model's tokenizer. Methods may be called from any thread at the same time."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, token_bytes: TokenBytes, config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = token_bytes
        self.vocab_size = len(token_bytes.table)  # ids below it exist
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.bos_token_id = self.token_id(self.bos_token)
        self.eos_token_id = self.token_id(self.eos_token)
        self._prefix, self._suffix = self._additions(config)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, if there is one, tokenizer_config.json. Raises ModelError."""
        description = read_tokenizer_json(folder)
        token_bytes = TokenBytes.from_tokenizer_json(description)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        check_token_bytes(tokenizer, token_bytes)
        return cls(tokenizer, token_bytes, read_optional_json(folder / "tokenizer_config.json"))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text; `add_special_tokens` puts around it what the model wants there (often BOS).

        Special tokens written out in the text become their ids. The GIL is free meanwhile. Raises ValueError for a
        text that is not valid Unicode (lone surrogates).
        """
        try:
            # `encode` would hold the GIL all the while.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            text.encode("utf-8")  # the library calls a string with lone surrogates no string; Python says where
            raise
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def literal_encoder(self) -> Callable[[str], list[int]]:
        """An encoder for which special tokens written out in a text are but text."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """A whole text at once, with U+FFFD for bytes that are no character."""
        text = self.token_bytes.decode(ids, skip_special_tokens).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.token_bytes.strips_leading_space else text

    def vocabulary(self, eos_token_ids: Sequence[int]) -> Vocabulary:
        """What grammars are compiled for. A model may name ends that do not exist."""
        ends = tuple(token for token in eos_token_ids if token < self.vocab_size)
        return Vocabulary(self.token_bytes.table, self.token_bytes.is_special, ends, self.literal_encoder())

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _additions(self, config: dict[str, Any]) -> tuple[list[int], list[int]]:
        """What goes before and after each text: the post-processor's tokens, as far as tokenizer_config.json agrees."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next(at for at in range(len(full) + 1) if full[at : at + len(plain)] == plain)
        prefix, suffix = full[:start], full[start + len(plain) :]
        for key, token_id, ids in (
            ("add_bos_token", self.bos_token_id, prefix),
            ("add_eos_token", self.eos_token_id, suffix),
        ):
            wanted = config.get(key)
            if wanted is True and token_id is not None and token_id not in ids:
                ids.append(token_id)
            elif wanted is False and token_id in ids:
                ids.remove(token_id)
        return prefix, suffix


def check_token_bytes(tokenizer: tokenizers.Tokenizer, token_bytes: TokenBytes) -> None:
    """Raises ModelError if what the table makes of a text's tokens is neither the text nor the library's decoding.

    The library reads an added token like "ü" as one byte of the byte-level alphabet; there the text itself is right.
    """
    for text in _CHECK_CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        found = token_bytes.decode(ids, skip_special=False).decode("utf-8", errors="replace")
        if token_bytes.strips_leading_space:
            found = found.removeprefix(" ")
        if found not in (expected, text):
            raise ModelError(f"tokenizer.json: its decoder is not understood; {text!r} came back as {found!r}")


def _content(token: Any) -> str | None:
    """A special token in tokenizer_config.json is a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str | None):
        raise ModelError(f"tokenizer_config.json: a special token must be a string, not {content!r}")
    return content
