"""L1, detokenizer process: what every open request still holds back of its text.

A token is bytes (`srt/token_bytes.py`), a text is the UTF-8 decoding of all its tokens' bytes. Bytes wait here for two
reasons only: they may be the first part of a character, or the first part of a stop string. So a request's state is
bounded by its longest stop string, however long the text.
"""

from __future__ import annotations

import logging
import struct
import time
from codecs import utf_8_decode
from collections.abc import Sequence

from srt.messages import Finish, Opening, TextBatch, TextDelta, TokenBatch, unpack_ids
from srt.token_bytes import TokenBytes

log = logging.getLogger(__name__)

_ONE_ID = struct.Struct("<i").unpack


class Detokenizer:
    """Tokens to text, request by request: opened by a request's first delta, forgotten with its last."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._all = token_bytes.table
        self._visible = [
            b"" if token_bytes.is_special[token] else piece for token, piece in enumerate(token_bytes.table)
        ]
        self._open: dict[int, _OpenText] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def decode(self, batch: TokenBatch) -> TextBatch:
        """One text delta for each token delta, in the same order, also where there is no text to show."""
        deltas = []
        for delta in batch.deltas:
            opening = delta.opening
            if opening is not None:
                text = _OpenText(opening, self._visible if opening.skip_special_tokens else self._all)
                self._open[delta.rid] = text
            elif (text := self._open.get(delta.rid)) is None:
                log.warning("step %d has tokens of request %d, which is not open: ignored", batch.step, delta.rid)
                continue
            if delta.finish is None:
                shown = text.extend(delta.ids)
            else:
                shown = text.finish(delta.ids, delta.finish)
                del self._open[delta.rid]
            logprobs = delta.logprobs, delta.prompt_logprobs
            given = (-1, None, 0)
            if opening is not None:
                given = opening.cached_tokens, opening.started, opening.restored_tokens
            cached_tokens, *rest = given
            deltas.append(TextDelta(delta.rid, shown, delta.ids, cached_tokens, delta.finish, *logprobs, *rest))
        return TextBatch(batch.step, tuple(deltas), batch.computed, batch.released, time.monotonic())


class _OpenText:
    """The text of one request, of which `_held` has not been shown."""

    __slots__ = ("_held", "_no_stop_trim", "_stop", "_stop_heads", "_table")

    def __init__(self, opening: Opening, table: Sequence[bytes]) -> None:
        self._table = table
        self._stop = opening.stop
        self._stop_heads = frozenset(stop[0] for stop in opening.stop)
        self._no_stop_trim = opening.no_stop_trim
        self._held = b""

    def extend(self, ids: bytes) -> str:
        """What may be shown once these tokens are known."""
        data = self._held + self._bytes(ids)
        held = b""
        if not self._stop_heads.isdisjoint(data):
            end = stop_begins(data, self._stop)
            data, held = data[:end], data[end:]
        try:
            text = data.decode()  # half the price of utf_8_decode
        except UnicodeDecodeError:
            text, used = utf_8_decode(data, "replace", False)
            held = data[used:] + held
        self._held = held
        return text

    def finish(self, ids: bytes, finish: Finish) -> str:
        """All that is left of the text, without the stop that ended it (unless the request wants it kept).

        `ids` has the token that ended the request: a stop is found when its last token is known, not later.
        """
        matched = finish.matched
        if isinstance(matched, int) and not self._no_stop_trim:
            ids = ids[:-4]  # the stop token is the last one
        data = self._held + self._bytes(ids)
        if isinstance(matched, bytes):
            # It ends in the new bytes: a match further back came before min_new_tokens and counts for nothing.
            start = data.find(matched, max(0, len(self._held) - len(matched) + 1))
            if start >= 0:
                data = data[: start + len(matched) if self._no_stop_trim else start]
        return data.decode(errors="replace")

    def _bytes(self, ids: bytes) -> bytes:
        table = self._table
        try:
            if len(ids) == 4:
                return table[_ONE_ID(ids)[0]]
            return b"".join([table[token] for token in unpack_ids(ids)])
        except IndexError:  # a model's vocabulary may be larger than the tokenizer's: such ids stand for nothing
            return b"".join([table[token] for token in unpack_ids(ids) if token < len(table)])


def stop_begins(data: bytes, stops: Sequence[bytes]) -> int:
    """Where the longest tail of `data` starts that is the beginning, but not the whole, of a stop string."""
    end = len(data)
    for stop in stops:
        first = stop[:1]
        start = data.find(first, max(0, len(data) - len(stop) + 1), end)
        while start >= 0:
            if stop.startswith(data[start:]):
                end = start
                break
            start = data.find(first, start + 1, end)
    return end
