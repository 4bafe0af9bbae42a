"""L1, frontend: calls that a model writes as JSON objects, each in marks of its format.

Between the marks stands an object or a list of them. What does not become a call is content, to the letter.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, auto

from srt.frontend.parsing.json_reader import CallReader
from srt.frontend.parsing.pieces import Arguments, CallStart, ContentGate, Piece, tail_that_may_become


class _In(Enum):
    START = auto()
    TEXT = auto()
    BODY = auto()  # a call, or a list of them, comes now
    CALL = auto()
    AFTER = auto()


class JsonCallParser:
    def __init__(
        self, names: Container[str], *, begin: str, end: str, bare: str, eager: bool, max_calls: int | None
    ) -> None:
        """Where the answer begins with `bare`, which may be empty, calls need no mark.

        `eager` gives a call away as it comes, for answers that a grammar holds to the form. Otherwise a call is given
        once it is complete, since until then it may still turn out to be text.
        """
        self._names = names
        self._begin, self._end = begin, end
        self._eager = eager
        self._max_calls = max_calls
        self._bare = bare
        self._in = _In.START if bare else _In.TEXT
        self._readers = {
            _In.START: self._read_start,
            _In.TEXT: self._read_text,
            _In.BODY: self._read_body,
            _In.CALL: self._read_call,
            _In.AFTER: self._read_after,
        }
        self._held = ""  # is decided with what comes next
        self._raw: list[str] = []  # what was read since the last text or call
        self._in_list = False
        self._call = CallReader(names)
        self._started = False  # some of the call that is being read was given away
        self._content = ContentGate()
        self.num_calls = 0
        self.cut = False  # a call was given away that is not whole

    def feed(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while text:
            text = self._readers[self._in](text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._started:
            self.num_calls += 1
            self.cut = True
        else:
            self._content.add("".join(self._raw) + self._held, pieces)
        self._content.finish(pieces)
        return pieces

    # Each reads what it can of a text that is not empty, and returns what the next state's reader has to read.

    def _read_start(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        if not bare:
            self._held = text
            return ""
        self._in = _In.BODY if bare[0] == self._bare else _In.TEXT
        return text

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        at = text.find(self._begin)
        if at >= 0:
            self._content.add(text[:at], pieces)
            self._in, self._raw = _In.BODY, [self._begin]
            return text[at + len(self._begin) :]
        at = tail_that_may_become(text, self._begin)
        self._content.add(text[:at], pieces)
        self._held = text[at:]
        return ""

    def _read_body(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        self._raw.append(text[: len(text) - len(bare)])
        if bare[:1] == "[" and not self._in_list:
            self._in_list = True
            self._raw.append("[")
            return bare[1:]
        if bare[:1] == "{" and self.num_calls != self._max_calls:
            self._in, self._call = _In.CALL, CallReader(self._names)
        elif bare:
            self._give_back(pieces)
        return bare

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        call = self._call
        end = call.feed(text, 0)
        self._raw.append(text[:end])
        if call.done or (self._eager and call.begun):
            if not self._started:
                self._started = True
                self._content.call()
                pieces.append(CallStart(self.num_calls, call.name))
            if arguments := call.take_arguments():
                pieces.append(Arguments(self.num_calls, arguments))
        if call.failed and not self._started:
            self._give_back(pieces)
        elif call.failed or call.done:
            self._in, self._raw, self._started = _In.AFTER, [], False
            self.cut = self.cut or call.failed
            self.num_calls += 1
        return text[end:]

    def _read_after(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        for mark, state in ((self._end, _In.TEXT), (self._begin, _In.BODY)):
            if mark.startswith(bare) and len(bare) < len(mark):
                self._held = text
                return ""
            if mark and bare.startswith(mark):
                self._in, self._in_list = state, False
                self._raw = [mark] if state is _In.BODY else []
                return bare[len(mark) :]
        if bare[0] in ",;{":
            self._in = _In.BODY
            start = len(text) - len(bare) + (bare[0] != "{")
            self._raw = [text[:start]]
            return text[start:]
        if bare[0] == "]" and self._in_list:
            self._in_list = False
            return bare[1:]
        self._in, self._in_list = _In.TEXT, False
        return text

    def _give_back(self, pieces: list[Piece]) -> None:
        self._content.add("".join(self._raw), pieces)
        self._in, self._in_list, self._raw = _In.TEXT, False, []
