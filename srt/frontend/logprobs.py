"""L1, main process: log-probabilities as the routes show them. JSON has no infinity, so the least value is FLOOR."""

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

    # ---- /generate -------------------------------------------------------------------------------------------------

    def native(self, logprobs: TokenLogprobs, ids: Sequence[int], with_text: bool) -> tuple[list, list]:
        """`output_token_logprobs` and `output_top_logprobs`: entries [log-probability, id, text or null]."""

        def entry(token: int, value: float) -> list[Any]:
            return [finite(value), token, self.text(token) if with_text else None]

        chosen = list(map(entry, ids, logprobs.chosen))
        top = [
            list(map(entry, top_ids, values)) or None
            for top_ids, values in zip(logprobs.top_ids, logprobs.top, strict=True)
        ]
        return chosen, top
