"""L1, frontend: what the parsers make of a model's text."""

from __future__ import annotations

from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A call of the function `name` begins; calls are numbered from 0."""

    index: int
    name: str


class Arguments(NamedTuple):
    """More of the arguments of the call `index`. All of them together are a JSON object, unless the answer was cut."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


def tail_that_may_become(text: str, marker: str) -> int:
    """Where the longest tail of `text` starts that is the beginning, but not the whole, of `marker`."""
    start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while start >= 0 and not marker.startswith(text[start:]):
        start = text.find(marker[0], start + 1)
    return len(text) if start < 0 else start


class ContentGate:
    """Content between calls. White space next to a call is its format's, unless content stands on both sides."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False
        self._called = False

    def add(self, text: str, pieces: list[Piece]) -> None:
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if self._called and not self._begun:
            shown = shown.lstrip()
        if shown:
            self._begun = True
            pieces.append(Content(shown))

    def call(self) -> None:
        self._called = True
        if not self._begun:
            self._held = ""

    def finish(self, pieces: list[Piece]) -> None:
        if self._held and not self._called:
            pieces.append(Content(self._held))
        self._held = ""
