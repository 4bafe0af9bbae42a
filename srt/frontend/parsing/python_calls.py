"""L1, frontend: calls that a model writes as a list of Python calls, `[f(city="Oslo"), g()]`, as its whole answer.

A call is given once it is complete: its arguments must first become JSON. What does not become a call is content, to
the letter. Nothing is ever run: only literals are read.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Container
from enum import Enum, auto
from typing import Any

from srt.frontend.parsing.pieces import Arguments, CallStart, ContentGate, Piece

BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_NAME = 256
MAX_CALL = 1 << 16  # characters, which Python's own parser reads in one go

_HEAD = re.compile(r"[A-Za-z_][\w.]*\s*\(", re.ASCII)
_PART_OF_HEAD = re.compile(r"[A-Za-z_][\w.]*\s*", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": True, "false": False, "null": None}


class _In(Enum):
    START = auto()
    BEFORE_CALL = auto()
    CALL = auto()
    AFTER_CALL = auto()
    AFTER_LIST = auto()
    TEXT = auto()


class PythonCallParser:
    def __init__(self, names: Container[str], *, max_calls: int | None) -> None:
        self._names = names
        self._max_calls = max_calls
        self._in = _In.START
        self._readers = {
            _In.START: self._read_start,
            _In.BEFORE_CALL: self._read_before,
            _In.CALL: self._read_call,
            _In.AFTER_CALL: self._read_after,
            _In.AFTER_LIST: self._read_end,
            _In.TEXT: self._read_text,
        }
        self._held = ""  # is decided with what comes next
        self._raw = ""  # what was read since the last text or call
        self._source = ""  # of the call that is being read
        self._open: list[str] = []  # what closes the brackets around, or the quote that ends a string
        self._escaped = False
        self._content = ContentGate()
        self.num_calls = 0
        self.cut = False

    def feed(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while text:
            text = self._readers[self._in](text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._content.add(self._raw + self._held, pieces)
        self._content.finish(pieces)
        return pieces

    # Each reads what it can of a text that is not empty, and returns what the next state's reader has to read.

    def _read_start(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        if len(bare) < len(BEGIN) and BEGIN.startswith(bare):
            self._held = text
            return ""
        listed = bare.removeprefix(BEGIN).lstrip()
        if not listed:
            self._held = text
            return ""
        if listed[0] != "[":
            self._in = _In.TEXT
            return text
        self._in, self._raw = _In.BEFORE_CALL, text[: len(text) - len(listed) + 1]
        return listed[1:]

    def _read_before(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        head = _HEAD.match(bare)
        if head is None:
            if not bare or (_PART_OF_HEAD.fullmatch(bare) and len(bare) <= MAX_NAME):
                self._held = text
                return ""
            return self._give_back(text, pieces)
        if head[0][:-1].rstrip() not in self._names or self.num_calls == self._max_calls:
            return self._give_back(text, pieces)
        self._raw += text[: len(text) - len(bare)] + head[0]
        self._in, self._source, self._open = _In.CALL, head[0], [")"]
        return bare[head.end() :]

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        at, end = 0, min(len(text), MAX_CALL + 1 - len(self._source))
        while at < end and self._open:
            self._read_char(text[at])
            at += 1
        self._raw += text[:at]
        self._source += text[:at]
        if not self._open:
            self._call(pieces)
        elif len(self._source) > MAX_CALL:
            return self._give_back(text[at:], pieces)
        return text[at:]

    def _read_char(self, char: str) -> None:
        closing = self._open[-1]
        if closing in "\"'":
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == closing:
                self._open.pop()
        elif char in "\"'":
            self._open.append(char)
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char == closing:
            self._open.pop()

    def _call(self, pieces: list[Piece]) -> None:
        call = read_call(self._source)
        if call is None:
            self._give_back("", pieces)
            return
        name, arguments = call
        self._content.call()
        pieces += CallStart(self.num_calls, name), Arguments(self.num_calls, arguments)
        self.num_calls += 1
        self._in, self._raw = _In.AFTER_CALL, ""

    def _read_after(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        if bare[:1] == ",":
            self._in, self._raw = _In.BEFORE_CALL, text[: len(text) - len(bare) + 1]
            return bare[1:]
        if bare[:1] == "]":
            self._in = _In.AFTER_LIST
            return bare[1:]
        if bare:
            self._in = _In.TEXT
            return text
        self._held = text
        return ""

    def _read_end(self, text: str, pieces: list[Piece]) -> str:
        bare = text.lstrip()
        if len(bare) < len(END) and END.startswith(bare):
            self._held = text
            return ""
        self._in = _In.TEXT
        return bare.removeprefix(END) if bare.startswith(END) else text

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        self._content.add(text, pieces)
        return ""

    def _give_back(self, text: str, pieces: list[Piece]) -> str:
        self._content.add(self._raw, pieces)
        self._in, self._raw = _In.TEXT, ""
        return text


def read_call(source: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of one Python call with keywords and literals; None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the model's style
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for half of a surrogate pair
        return ast.unparse(call.func), text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """ValueError for what JSON does not have."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a JSON value")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise ValueError("not a key of JSON")
