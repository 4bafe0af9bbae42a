"""L1, frontend: JSON that comes in pieces; how they are cut makes no difference."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from enum import Enum, auto

_WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = "0123456789abcdefABCDEF"


class _At(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or `]`
    FIRST_KEY = auto()  # a key or `}`
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # `,` or what closes
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()
    DONE = auto()
    FAILED = auto()


class ValueReader:
    """Reads one JSON value of any kind and depth (RFC 8259)."""

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._open: list[str] = []  # what closes the objects and arrays around
        self._is_key = False
        self._hex = 0  # digits that an escape still wants
        self._scalar = ""

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def feed(self, text: str, start: int) -> int:
        """Reads from `start` on and returns where it stopped: behind the value, at what is no JSON, or at the end."""
        at, end = start, len(text)
        while at < end and not (self.done or self.failed):
            if self._at is _At.STRING:
                at = _PLAIN.match(text, at).end()
                at += at < end and self._string(text[at])
            elif self._at is _At.ESCAPE:
                at += self._escape(text[at])
            elif self._at is _At.SCALAR:
                more = _SCALAR_PART.match(text, at)
                self._scalar += more[0]
                at = more.end()
                if at < end:
                    self._end_scalar()
            elif text[at] in _WHITESPACE:
                at += 1
            else:
                at += self._punctuation(text[at])
        return at

    def _punctuation(self, char: str) -> bool:
        """Whether the character was taken."""
        at = self._at
        if self._open and char == self._open[-1] and at in (_At.NEXT, _At.FIRST_ITEM, _At.FIRST_KEY):
            self._open.pop()
            self._end_value()
        elif at is _At.NEXT and char == ",":
            self._at = _At.KEY if self._open[-1] == "}" else _At.VALUE
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at in (_At.KEY, _At.FIRST_KEY) and char == '"':
            self._at, self._is_key = _At.STRING, True
        elif at in (_At.VALUE, _At.FIRST_ITEM):
            return self._begin_value(char)
        else:
            self._at = _At.FAILED
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self._at = _At.FIRST_KEY
        elif char == "[":
            self._open.append("]")
            self._at = _At.FIRST_ITEM
        elif char == '"':
            self._at, self._is_key = _At.STRING, False
        else:
            self._at, self._scalar = _At.SCALAR, ""
            if not _SCALAR_PART.match(char)[0]:
                self._at = _At.FAILED
            return False
        return True

    def _end_value(self) -> None:
        self._at = _At.NEXT if self._open else _At.DONE

    def _end_scalar(self) -> None:
        if _SCALAR.fullmatch(self._scalar):
            self._end_value()
        else:
            self._at = _At.FAILED

    def _string(self, char: str) -> bool:
        if char == "\\":
            self._at = _At.ESCAPE
        elif char == '"' and self._is_key:
            self._at = _At.COLON
        elif char == '"':
            self._end_value()
        else:
            self._at = _At.FAILED
            return False
        return True

    def _escape(self, char: str) -> bool:
        if self._hex:
            taken = char in _HEX
            self._hex -= 1
        else:
            taken = char in '"\\/bfnrtu'
            self._hex = 4 * (char == "u")
        if not taken:
            self._at = _At.FAILED
        elif not self._hex:
            self._at = _At.STRING
        return taken


class _Call(Enum):
    OPENING = auto()
    FIRST_KEY = auto()  # or `}`
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    MEMBER = auto()
    IN_MEMBER = auto()
    NEXT = auto()  # `,` or `}`
    DONE = auto()
    FAILED = auto()


_CALL_MARKS = {
    (_Call.OPENING, "{"): _Call.FIRST_KEY,
    (_Call.COLON, ":"): _Call.MEMBER,
    (_Call.NEXT, ","): _Call.KEY,
    (_Call.NEXT, "}"): _Call.DONE,
    (_Call.FIRST_KEY, "}"): _Call.DONE,
}


class CallReader:
    """Reads `{"name": …, "arguments": {…}}`, in any order and with any other members; `parameters` says the same."""

    def __init__(self, names: Container[str]) -> None:
        """Only calls of these functions are calls."""
        self._names = names
        self._at = _Call.OPENING
        self._inner = ValueReader()  # of the key or value that is being read
        self._text: list[str] = []  # of the key, or of the name
        self._key = ""
        self._arguments: list[str] | None = None
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._at is _Call.DONE

    @property
    def failed(self) -> bool:
        return self._at is _Call.FAILED

    @property
    def begun(self) -> bool:
        """The name is known, and so is the beginning of its arguments."""
        return self.name is not None and (self.done or self._arguments is not None)

    def take_arguments(self) -> str:
        """What came since the last time."""
        if self._arguments is None:
            return "{}" if self.done else ""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def feed(self, text: str, start: int) -> int:
        """As `ValueReader.feed`."""
        at, end = start, len(text)
        while at < end and not (self.done or self.failed):
            if self._at in (_Call.IN_KEY, _Call.IN_MEMBER):
                at = self._read_inner(text, at)
            elif text[at] in _WHITESPACE:
                at += 1
            elif self._at is _Call.MEMBER:
                self._begin_member(text[at])
            elif self._at in (_Call.KEY, _Call.FIRST_KEY) and text[at] == '"':
                self._begin_inner(_Call.IN_KEY)
            else:
                self._at = _CALL_MARKS.get((self._at, text[at]), _Call.FAILED)
                if self.done and self.name is None:
                    self._at = _Call.FAILED
                at += not self.failed
        return at

    def _begin_inner(self, at: _Call) -> None:
        self._at, self._inner, self._text = at, ValueReader(), []

    def _begin_member(self, first: str) -> None:
        self._begin_inner(_Call.IN_MEMBER)
        if self._key == "arguments" and (self._arguments is not None or first != "{"):
            self._at = _Call.FAILED
        elif self._key == "arguments":
            self._arguments = []
        elif self._key == "name" and (self.name is not None or first != '"'):
            self._at = _Call.FAILED

    def _read_inner(self, text: str, start: int) -> int:
        end = self._inner.feed(text, start)
        if self._at is _Call.IN_MEMBER and self._key == "arguments":
            self._arguments.append(text[start:end])
        elif self._at is _Call.IN_KEY or self._key == "name":
            self._text.append(text[start:end])
        if self._inner.failed:
            self._at = _Call.FAILED
        elif self._inner.done and self._at is _Call.IN_KEY:
            key = json.loads("".join(self._text))
            self._key = "arguments" if key == "parameters" else key
            self._at = _Call.COLON
        elif self._inner.done:
            self._at = _Call.NEXT
            if self._key == "name":
                name = json.loads("".join(self._text))
                self._at, self.name = (_Call.NEXT, name) if name in self._names else (_Call.FAILED, None)
        return end
