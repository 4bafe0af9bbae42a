"""L1, frontend: which forms the served model's answers have, by the flags or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from srt.chat_template import ChatTemplate
from srt.config import ServerConfig
from srt.frontend.parsing import reasoning, tool_calls
from srt.frontend.parsing.reasoning import ReasoningFormat
from srt.frontend.parsing.tool_calls import CallFormat


@dataclass(frozen=True)
class Formats:
    """Names as the flags have them; None where there is none or where none is sure."""

    tool_call_parser: str | None
    reasoning_parser: str | None

    @property
    def calls(self) -> CallFormat | None:
        return tool_calls.FORMATS[self.tool_call_parser] if self.tool_call_parser else None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return reasoning.FORMATS[self.reasoning_parser] if self.reasoning_parser else None


def choose(config: ServerConfig, template: ChatTemplate | None) -> Formats:
    calls: str | None = config.tool_call_parser
    if calls == "auto" and template is not None:
        # A template that does not know tools is given them as text, in the form of hermes.
        calls = tool_calls.detect(template.source) if template.takes_tools else "hermes"
    thoughts: str | None = config.reasoning_parser
    if thoughts == "auto" and template is not None:
        thoughts = reasoning.detect(template.source)
    return Formats(*(None if name in ("auto", "none") else name for name in (calls, thoughts)))
