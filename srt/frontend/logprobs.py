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


class TokenTexts:
    """What single tokens look like."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._table = token_bytes.table

    def raw(self, token: int) -> bytes:
        return self._table[token] if 0 <= token < len(self._table) else b""

    def text(self, token: int) -> str:
        """Text that tells any two tokens apart whose bytes differ, as OpenAI writes parts of characters."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    # ---- chat ------------------------------------------------------------------------------------------------------

    def chat(self, logprobs: TokenLogprobs, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "content": [
                {**self._chat_token(token, chosen), "top_logprobs": list(map(self._chat_token, top_ids, top))}
                for token, chosen, top_ids, top in zip(
                    ids, logprobs.chosen, logprobs.top_ids, logprobs.top, strict=True
                )
            ]
        }

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "bytes": list(self.raw(token)), "logprob": finite(logprob)}

    # ---- completions -----------------------------------------------------------------------------------------------

    def completion(self, logprobs: TokenLogprobs, ids: Sequence[int], offset: int) -> dict[str, Any]:
        """`offset` is where in the output these tokens begin, in characters. The chosen token is always in the top."""
        tokens = [self.text(token) for token in ids]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        chosen = [finite(value) for value in logprobs.chosen]
        top = []
        for text, value, top_ids, values in zip(tokens, chosen, logprobs.top_ids, logprobs.top, strict=True):
            best = {self.text(token): finite(other) for token, other in zip(top_ids, values, strict=True)}
            top.append({**best, text: value})
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
        """`token_logprobs`, `top_logprobs`, `token_ids_logprobs`: entries [log-probability, id, text or null]."""

        def entry(token: int, value: float) -> list[Any]:
            return [finite(value), token, self.text(token) if with_text else None]

        chosen = list(map(entry, ids, logprobs.chosen))
        top = [
            list(map(entry, top_ids, values)) or None
            for top_ids, values in zip(logprobs.top_ids, logprobs.top, strict=True)
        ]
        return chosen, top, [list(map(entry, asked_ids, values)) for values in logprobs.asked]

    def native_prompt(
        self, logprobs: TokenLogprobs, ids: Sequence[int], start: int, asked_ids: Sequence[int], with_text: bool
    ) -> tuple[list, list, list]:
        """The same of a prompt from position `start` on. Nothing rates a prompt's first token."""
        lists = self.native(logprobs, ids[max(1, start) :], asked_ids, with_text)
        if start == 0:
            first = [None, ids[0], self.text(ids[0]) if with_text else None]
            head = ([first], [None], [None] if asked_ids else [])
            lists = tuple(before + behind for before, behind in zip(head, lists, strict=True))
        return lists
