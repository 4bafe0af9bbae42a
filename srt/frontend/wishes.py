"""L1, frontend: what clients ask for beside their prompts. Owns what was made of it when it was first asked for.

Programs say the same of sampling in one request after the other, so it is read and checked once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from srt.frontend.protocol import Fields
from srt.frontend.words import Words

MOST_WISHES = 1024
MOST_BYTES = 4096  # of one that is kept

T = TypeVar("T")


class Wishes(Generic[T]):
    def __init__(self, make: Callable[[bytes], T], words: Words) -> None:
        """`make` takes JSON, may raise, and may be called in any thread. What it makes must not be changed."""
        self._make = make
        self._words = words
        self._known: dict[bytes, T] = {}  # oldest first

    async def of(self, fields: Fields) -> T:
        """What is made of the fields of a body."""
        said = msgspec.json.encode(fields)
        if len(said) > MOST_BYTES:
            return await self._words.in_thread(self._make, said)
        wish = self._known.get(said)
        if wish is None:
            wish = self._make(said)
            if len(self._known) == MOST_WISHES:
                del self._known[next(iter(self._known))]
            self._known[said] = wish
        return wish
