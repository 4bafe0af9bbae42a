"""L1, frontend: log-probabilities as the routes show them. JSON has no infinity, so the least value is FLOOR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srt.messages import TokenLogprobs
from srt.token_bytes import TokenBytes

FLOOR = -9999.0
NO_LOGPROBS = TokenLogprobs((), (), ())


def finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # NaN is not greater either


class _Texts(dict[int, str]):
    """What single tokens look like, once it was asked."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table

    def __missing__(self, token: int) -> str:
        raw = self._table[token] if 0 <= token < len(self._table) else b""
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        self[token] = text
        return text


class TokenTexts:
    """Lists for JSON; there may be millions of entries, so each is made by one expression."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._table = token_bytes.table
        self._texts = _Texts(token_bytes.table)

    def raw(self, token: int) -> bytes:
        return self._table[token] if 0 <= token < len(self._table) else b""

    def text(self, token: int) -> str:
        """Text that tells any two tokens apart whose bytes differ, as OpenAI writes parts of characters."""
        return self._texts[token]

    # ---- chat ------------------------------------------------------------------------------------------------------

    def chat(self, logprobs: TokenLogprobs, ids: Sequence[int]) -> dict[str, Any]:
        content = self._chat_tokens(ids, logprobs.chosen)
        for token, top_ids, top in zip(content, logprobs.top_ids, logprobs.top, strict=True):
            token["top_logprobs"] = self._chat_tokens(top_ids, top)
        return {"content": content}

    def _chat_tokens(self, ids: Sequence[int], values: Sequence[float]) -> list[dict[str, Any]]:
        texts, raw = self._texts, self.raw
        return [
            {"token": texts[token], "bytes": list(raw(token)), "logprob": value if value > FLOOR else FLOOR}
            for token, value in zip(ids, values, strict=True)
        ]

    # ---- completions -----------------------------------------------------------------------------------------------

    def completion(self, logprobs: TokenLogprobs, ids: Sequence[int], offset: int) -> dict[str, Any]:
        """`offset` is where in the output these tokens begin, in characters. The chosen token is always in the top."""
        texts = self._texts
        tokens = [texts[token] for token in ids]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        chosen = [finite(value) for value in logprobs.chosen]
        top = []
        for text, value, top_ids, values in zip(tokens, chosen, logprobs.top_ids, logprobs.top, strict=True):
            best = {
                texts[token]: other if other > FLOOR else FLOOR for token, other in zip(top_ids, values, strict=True)
            }
            best[text] = value
            top.append(best)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def completion_prompt(self, logprobs: TokenLogprobs, ids: Sequence[int]) -> dict[str, Any]:
        """Of a prompt, whose first token nothing rates; of one that was aborted before it was read only that."""
        first = self.text(ids[0])
        behind = self.completion(logprobs, ids[1 : 1 + len(logprobs.chosen)], len(first))
        head = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
        return {name: [head[name], *values] for name, values in behind.items()}

    def prompt_by_id(self, logprobs: TokenLogprobs, ids: Sequence[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token of a prompt but the first a dictionary by token id.

        A prompt that was aborted before it was read has none of these.
        A chosen token that is not among the alternatives has no rank: it was not looked for.
        """
        shown: list[dict[str, Any] | None] = [None]
        rated = ids[1 : 1 + len(logprobs.chosen)]
        for token, value, top_ids, values in zip(rated, logprobs.chosen, logprobs.top_ids, logprobs.top, strict=True):
            entries = {str(token): self._ranked(token, value, None)}
            for rank, (other, its) in enumerate(zip(top_ids, values, strict=True), 1):
                entries[str(other)] = self._ranked(other, its, rank)
            shown.append(entries)
        return shown

    def _ranked(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(value), "rank": rank, "decoded_token": self.text(token)}

    # ---- /generate -------------------------------------------------------------------------------------------------

    def native(
        self, logprobs: TokenLogprobs, ids: Sequence[int], asked_ids: Sequence[int], with_text: bool
    ) -> tuple[list, list, list]:
        """`token_logprobs`, `top_logprobs`, `token_ids_logprobs`: entries (log-probability, id, text or null)."""

        text_of = self._texts.__getitem__ if with_text else {}.get

        def entries(tokens: Sequence[int], values: Sequence[float]) -> list[tuple]:
            return [
                (value if value > FLOOR else FLOOR, token, text_of(token))
                for token, value in zip(tokens, values, strict=False)  # of an aborted prompt there are none
            ]

        top = [entries(*each) or None for each in zip(logprobs.top_ids, logprobs.top, strict=True)]
        return entries(ids, logprobs.chosen), top, [entries(asked_ids, values) for values in logprobs.asked]

    def native_prompt(
        self, logprobs: TokenLogprobs, ids: Sequence[int], start: int, asked_ids: Sequence[int], with_text: bool
    ) -> tuple[list, list, list]:
        """The same of a prompt from position `start` on. Nothing rates a prompt's first token."""
        lists = self.native(logprobs, ids[max(1, start) :], asked_ids, with_text)
        if start == 0:
            first = (None, ids[0], self.text(ids[0]) if with_text else None)
            head = ([first], [None], [None] if asked_ids else [])
            lists = tuple(before + behind for before, behind in zip(head, lists, strict=True))
        return lists
