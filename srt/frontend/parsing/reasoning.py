"""L1, frontend: a reasoning model's thoughts apart from its answer. Owns the formats by name."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from srt.frontend.parsing.pieces import Content, Piece, Reasoning, tail_that_may_become


@dataclass(frozen=True)
class ReasoningFormat:
    begin: str
    end: str
    unopened: bool = False  # the model thinks even where neither it nor the prompt says so


FORMATS = {
    "deepseek-r1": ReasoningFormat("<think>", "</think>", unopened=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
}


def detect(template: str) -> str | None:
    """The format of which a chat template speaks; None where that is not sure."""
    found = [name for name in ("kimi", "magistral", "qwen3") if FORMATS[name].end in template]
    return found[0] if len(found) == 1 else None


class _In(Enum):
    OPENING = auto()
    REASONING = auto()
    ANSWER = auto()


class ReasoningParser:
    """Splits one answer. Line ends next to the marks belong to the marks."""

    def __init__(self, form: ReasoningFormat, prompt: str, *, verbatim: bool = False) -> None:
        """`prompt` is the text that the answer goes on with: it may have opened the reasoning, or closed it.

        With `verbatim` the marks are part of the reasoning, and so is what stands beside them.
        """
        self._form = form
        self._verbatim = verbatim
        self._unopened = begins_inside(form, prompt)
        self._in = _In.OPENING
        self._held = ""  # may become a mark
        self._shown = str if verbatim else _Trimmed().feed
        self._answered = True  # whether line ends are the answer's own

    def feed(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        if self._in is _In.OPENING:
            text = self._open(text)
        reasoning = ""
        if self._in is _In.REASONING:
            reasoning, text = self._reason(text)
        if not self._answered:
            text = text.lstrip("\n")
            self._answered = bool(text)
        return [kind(part) for kind, part in ((Reasoning, reasoning), (Content, text)) if part]

    def finish(self) -> list[Piece]:
        """What is left once no more text will come."""
        text, self._held = self._held, ""
        if self._in is _In.REASONING or (self._in is _In.OPENING and self._unopened):
            text = self._shown(text)
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _open(self, text: str) -> str:
        """What follows the opening mark, if one is there; what may become one waits."""
        begin, bare = self._form.begin, text.lstrip()
        if len(bare) < len(begin) and begin.startswith(bare):
            self._held = text
            return ""
        opened = bare.startswith(begin)
        self._in = _In.REASONING if opened or self._unopened else _In.ANSWER
        return bare.removeprefix(begin) if opened and not self._verbatim else text

    def _reason(self, text: str) -> tuple[str, str]:
        """More of the reasoning, and what follows its end."""
        end = self._form.end
        at = text.find(end)
        if at >= 0:
            self._in, self._answered = _In.ANSWER, self._verbatim
            return self._shown(text[: at + len(end) * self._verbatim]), text[at + len(end) :]
        held = tail_that_may_become(text, end)
        self._held = text[held:]
        return self._shown(text[:held]), ""


class _Trimmed:
    """Text without the line ends before and behind it."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def feed(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def begins_inside(form: ReasoningFormat, prompt: str) -> bool:
    """Whether an answer to `prompt` is reasoning from its first character on."""
    prompt = prompt.rstrip()
    return prompt.endswith(form.begin) or (form.unopened and not prompt.endswith(form.end))


def count_tokens(form: ReasoningFormat, prompt: str, pieces: Sequence[bytes]) -> int:
    """How many of an answer's tokens, given as their bytes, are reasoning or its marks."""
    data = b"".join(pieces)
    if not begins_inside(form, prompt) and not data.lstrip().startswith(form.begin.encode()):
        return 0
    end = form.end.encode()
    at = data.find(end)
    if at < 0:
        return len(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    return bisect_left(ends, at + len(end)) + 1
