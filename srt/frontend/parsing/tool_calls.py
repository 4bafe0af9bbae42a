"""L1, frontend: in which forms models write tool calls. Owns the formats by name."""

from __future__ import annotations

import json
import secrets
import string
import uuid
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from srt.frontend.parsing.json_calls import JsonCallParser
from srt.frontend.parsing.pieces import Piece
from srt.frontend.parsing.python_calls import BEGIN as PYTHON_BEGIN
from srt.frontend.parsing.python_calls import END as PYTHON_END
from srt.frontend.parsing.python_calls import PythonCallParser


class CallParser(Protocol):
    """Finds the calls in one answer; how its text is cut makes no difference to what all pieces say together."""

    num_calls: int
    cut: bool  # a call was given away that is not whole

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What is left once no more text will come."""


@dataclass(frozen=True)
class JsonFormat:
    """One call is `call_begin`, an object with the name and, under `key`, the arguments, and `call_end`."""

    mark: str  # what begins one call or all of them, to the parser
    end_mark: str = ""
    bare: str = ""  # what the answer begins with where calls come without marks
    begin: str = ""
    call_begin: str = ""
    key: str = "arguments"
    call_end: str = ""
    between: str = ""
    end: str = ""
    short_ids: bool = False  # its chat templates take ids of nine letters and digits

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.mark, self.end_mark)))

    def parser(self, names: Container[str], *, eager: bool, max_calls: int | None) -> CallParser:
        return JsonCallParser(
            names, begin=self.mark, end=self.end_mark, bare=self.bare, eager=eager, max_calls=max_calls
        )

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Calls, by name and arguments as JSON, as the model writes them."""
        return self.begin + self.between.join(f"{self.head(name)}{text}{self.tail}" for name, text in calls) + self.end

    def head(self, name: str) -> str:
        """All of a call before its arguments."""
        return f'{self.call_begin}{{"name": {json.dumps(name)}, "{self.key}": '

    @property
    def tail(self) -> str:
        """All of a call after its arguments."""
        return "}" + self.call_end


@dataclass(frozen=True)
class PythonFormat:
    short_ids: bool = False
    marks: tuple[str, ...] = (PYTHON_BEGIN, PYTHON_END)

    def parser(self, names: Container[str], *, eager: bool, max_calls: int | None) -> CallParser:
        return PythonCallParser(names, max_calls=max_calls)


CallFormat = JsonFormat | PythonFormat

HERMES = JsonFormat(
    "<tool_call>", "</tool_call>", call_begin="<tool_call>\n", call_end="\n</tool_call>", between="\n"
)  # fmt: skip
LLAMA3 = JsonFormat("<|python_tag|>", bare="{", key="parameters", between="; ")
MISTRAL = JsonFormat("[TOOL_CALLS]", begin="[TOOL_CALLS] [", between=", ", end="]", short_ids=True)
PYTHONIC = PythonFormat()
JSON_LIST = JsonFormat("<|python_tag|>", bare="[", begin="[", key="parameters", between=", ", end="]")

FORMATS: dict[str, CallFormat] = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "llama4": PYTHONIC,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen": HERMES,
    "qwen25": HERMES,
}

_TRACES = {
    "hermes": ("<tool_call>", "arguments"),
    "llama3": ('"parameters": dictionary of argument name',),
    "mistral": ("[TOOL_CALLS]",),
    "pythonic": ("[func_name1(",),
}
_OTHERS = ("<function=", "<arg_key>", "[ARGS]", "<|tool_call", "<｜tool▁calls▁begin｜>", "<|channel|>", "<TOOLCALL>")
"""Traces of forms that are not here; some templates speak of one of ours beside them."""


def detect(template: str) -> str | None:
    """The format of which a chat template speaks; None where that is not sure."""
    found = [name for name, traces in _TRACES.items() if all(trace in template for trace in traces)]
    return found[0] if len(found) == 1 and not any(other in template for other in _OTHERS) else None


def new_call_id(form: CallFormat, prefix: str = "call_") -> str:
    """One that the model's chat template takes when the call comes back. Without a prefix if that is short."""
    if form.short_ids:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return prefix + uuid.uuid4().hex[:24]
