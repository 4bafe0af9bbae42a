"""L1, frontend: what a chat request says of tools, checked: functions, and which may or must be called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from srt.frontend.errors import RequestError
from srt.frontend.protocol import ChatRequest

MAX_TOOLS = 1024

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class Function:
    name: str
    parameters: dict[str, Any]  # a JSON schema
    strict: bool


@dataclass(frozen=True)
class ToolUse:
    """`callable` are the functions that may be called; with `forced` at least one call must come, and nothing else."""

    template_tools: tuple[dict[str, Any], ...] = ()  # as the chat template is given them
    callable: tuple[Function, ...] = ()
    forced: bool = False
    max_calls: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.callable)


def check_tools(tools: list[Any] | None) -> list[Function]:
    """RequestError for what are no functions."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(f"`tools` takes at most {MAX_TOOLS}.", param="tools")
    functions: dict[str, Function] = {}
    for at, tool in enumerate(tools or []):
        function = _function(tool, at)
        if functions.setdefault(function.name, function) is not function:
            raise _fault(at, f"there is another function `{function.name}`")
    return list(functions.values())


def for_template(tools: list[Any] | None) -> tuple[dict[str, Any], ...]:
    """Checked tools without `strict`, which is for us and not for the model."""
    functions = [{key: value for key, value in tool["function"].items() if key != "strict"} for tool in tools or []]
    return tuple({**tool, "function": function} for tool, function in zip(tools or [], functions, strict=True))


def read_tools(body: ChatRequest) -> ToolUse:
    """RequestError for tools or a choice that make no sense."""
    functions = check_tools(body.tools)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if functions else "none"
    template_tools = for_template(body.tools)
    max_calls = 1 if body.parallel_tool_calls is False else None
    if choice == "none" or (choice == "auto" and not functions):
        return ToolUse(template_tools)
    if choice == "auto":
        return ToolUse(template_tools, tuple(functions), max_calls=max_calls)
    if not functions:
        raise RequestError("`tool_choice` asks for a call, but there are no `tools`.", param="tool_choice")
    if choice == "required":
        return ToolUse(template_tools, tuple(functions), forced=True, max_calls=max_calls)
    name = _chosen(choice)
    chosen = tuple(function for function in functions if function.name == name)
    if not chosen:
        raise RequestError(f"`tool_choice`: there is no function `{name[:100]}` in `tools`.", param="tool_choice")
    return ToolUse(template_tools, chosen, forced=True, max_calls=1)


def _chosen(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError(
        "`tool_choice` must be `none`, `auto`, `required` or "
        '{"type": "function", "function": {"name": …}}.',
        param="tool_choice",
    )  # fmt: skip


def _function(tool: Any, at: int) -> Function:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function} if _NAME.fullmatch(name):
            parameters, strict = function.get("parameters"), function.get("strict")
        case {"type": str(kind)} if kind != "function":
            raise _fault(at, f"only functions can be called, not a tool of type `{kind[:50]}`")
        case {"type": "function", "function": dict()}:
            raise _fault(at, "its `name` must be 1 to 128 letters, digits and _.:/-")
        case _:
            raise _fault(at, 'must be {"type": "function", "function": {"name": …}}')
    if not isinstance(function.get("description"), str | None):
        raise _fault(at, "its `description` must be a string")
    if not isinstance(strict, bool | None):
        raise _fault(at, "its `strict` must be true or false")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _fault(at, "its `parameters` must be a JSON schema of type `object`")
    return Function(name, parameters, bool(strict))


def _fault(at: int, sentence: str) -> RequestError:
    return RequestError(f"`tools[{at}]`: {sentence}.", param="tools")
