"""L1, frontend: what was said in chats. Owns the ids of past prompts with their answers, by a digest of their text.

A client sends its chat back as text. Tokenised anew, an answer may become other ids than the model gave it as, since
what is sampled need not be what a tokenizer would choose; then the cached prefix ends there. So a chat that goes on
gets the ids that were really read and written, and only what is new is tokenised. It may be forgotten at any time.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

from srt.messages import Ids

CAPACITY = 1 << 22  # tokens, 16 MB


class Conversations:
    """Any threads may call any of it."""

    def __init__(self, ends: Sequence[str], capacity: int = CAPACITY) -> None:
        """`ends` are the special tokens that end an answer: after them, and only there, is tokenising sure to split."""
        self._end = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        self._capacity = capacity
        self._changing = threading.Lock()
        self._size = 0
        self._ids: OrderedDict[bytes, Ids] = OrderedDict()  # oldest first

    def remember(self, namespace: bytes, prompt: str, answer: str, ids: Ids) -> None:
        """`ids` are those of prompt and answer together, without the token that ended it."""
        digest = _digest_of(namespace)
        digest.update(_encode(prompt + answer))
        key = digest.digest()
        with self._changing:
            self._size += len(ids) - len(self._ids.pop(key, b""))
            self._ids[key] = ids
            while self._size > 4 * self._capacity:
                self._size -= len(self._ids.popitem(last=False)[1])

    def recall(self, namespace: bytes, text: str) -> tuple[Ids, int]:
        """The ids of the longest beginning of `text` that was said, and its length in characters."""
        digest = _digest_of(namespace)
        found, length, start = b"", 0, 0
        for end in (*(match.start() for match in self._end.finditer(text)), len(text)):
            digest.update(_encode(text[start:end]))
            start = end
            if ids := self._ids.get(digest.digest()):
                found, length = ids, end
        return found, length


def _digest_of(namespace: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=32)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
