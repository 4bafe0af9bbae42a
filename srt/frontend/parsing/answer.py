"""L1, frontend: a chat answer's text taken apart into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from srt.frontend.parsing.pieces import Content, Piece, Reasoning
from srt.frontend.parsing.reasoning import ReasoningFormat, ReasoningParser, count_tokens
from srt.frontend.parsing.tool_calls import CallFormat


class AnswerFormat(NamedTuple):
    """How to read the answers to one prompt."""

    prompt: str  # its text
    reasoning: ReasoningFormat | None = None
    separate_reasoning: bool = True
    show_reasoning: bool = True
    stream_reasoning: bool = True
    calls: CallFormat | None = None
    names: tuple[str, ...] = ()  # of the functions that may be called
    max_calls: int | None = None
    constrained: bool = False  # a grammar holds the calls to their form

    @property
    def is_plain(self) -> bool:
        """All is content as it is."""
        return self.calls is None and not self.splits_reasoning

    @property
    def splits_reasoning(self) -> bool:
        """Also where it stays in the content: it is no place for calls."""
        return self.reasoning is not None and (self.separate_reasoning or self.calls is not None)

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parser must see in the text."""
        marks = () if self.calls is None else self.calls.marks
        if self.splits_reasoning:
            marks += self.reasoning.begin, self.reasoning.end
        return marks

    def parser(self) -> AnswerParser:
        return AnswerParser(self)

    def count_reasoning(self, pieces: Sequence[bytes]) -> int:
        """How many of an answer's tokens, given as their bytes, are reasoning."""
        return 0 if self.reasoning is None else count_tokens(self.reasoning, self.prompt, pieces)


class AnswerParser:
    """One answer, in any cuts."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._reasoning = None
        if form.splits_reasoning:
            self._reasoning = ReasoningParser(form.reasoning, form.prompt, verbatim=not form.separate_reasoning)
        self._calls = None
        if form.calls is not None:
            self._calls = form.calls.parser(form.names, eager=form.constrained, max_calls=form.max_calls)
        self._held: list[Piece] = []  # reasoning that is to come in one piece

    @property
    def called(self) -> bool:
        """There are calls, and all of them are whole."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.cut

    def feed(self, text: str) -> list[Piece]:
        pieces = [Content(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        return self._shown(self._find_calls(pieces))

    def finish(self) -> list[Piece]:
        """What is left once no more text will come."""
        pieces = self._find_calls([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is not None:
            pieces += self._calls.finish()
        shown = self._shown(pieces)
        return merge(shown + self._held)

    def _find_calls(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if self._calls and isinstance(piece, Content) else [piece]
        return found

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        if not self._form.separate_reasoning:
            return [Content(piece.text) if isinstance(piece, Reasoning) else piece for piece in pieces]
        if not self._form.show_reasoning:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        if self._form.stream_reasoning:
            return pieces
        self._held += pieces
        if all(isinstance(piece, Reasoning) for piece in pieces):
            return []
        pieces, self._held = self._held, []
        return merge(pieces)


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined."""
    merged: list[Piece] = []
    for _, alike in groupby(pieces, key=lambda piece: (type(piece), piece[:-1])):
        first, *others = alike
        merged.append(first._replace(text="".join([first.text, *(one.text for one in others)])) if others else first)
    return merged
