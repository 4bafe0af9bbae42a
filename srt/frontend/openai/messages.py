"""L1, frontend: from a client's chat messages to what a chat template is given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from srt.chat_template import RESERVED
from srt.frontend.errors import RequestError
from srt.frontend.parsing.tool_calls import HERMES
from srt.frontend.protocol import ChatRequest, Message, Part

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TOOLS_PROMPT = """\
You can call functions. Each of these lines describes one, its parameters as a JSON schema:
{}
To call a function, answer with its name and arguments in this form, once for each call:
<tool_call>
{{"name": NAME, "arguments": {{PARAMETER: VALUE}}}}
</tool_call>"""


def chat_for_template(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], takes_tools: bool
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Messages and tools as the template is given them. RequestError for messages that no template can take."""
    if takes_tools:
        return template_messages(messages), tools
    return with_tools_as_text(messages, tools), ()


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain dictionaries with text only. RequestError for an unknown role or a part that is not text."""
    if not messages:
        raise RequestError("`messages` must not be empty.", param="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `template_messages`, for a template that does not know tools: functions, calls and results become text.

    Arguments stay as the client sends them, so that a call which comes back is the very text that the model wrote.
    """
    plain: list[dict[str, Any]] = []
    pairs = zip(messages, template_messages(messages), strict=True)
    for are_results, run in itertools.groupby(pairs, key=lambda pair: pair[1]["role"] in ("tool", "function")):
        if are_results:
            texts = [f"<tool_response>\n{taken['content']}\n</tool_response>" for _, taken in run]
            plain.append({"role": "user", "content": "\n".join(texts)})
        else:
            plain += itertools.starmap(_with_calls_as_text, run)
    if tools:
        described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        prompt = _TOOLS_PROMPT.format(described)
        if plain[0]["role"] == "system":
            plain[0]["content"] += "\n\n" + prompt
        else:
            plain.insert(0, {"role": "system", "content": prompt})
    return plain


def _with_calls_as_text(message: Message, taken: dict[str, Any]) -> dict[str, Any]:
    if taken.pop("tool_calls", ()):
        calls = HERMES.write((call["function"]["name"], _arguments_text(call)) for call in message.tool_calls)
        taken["content"] += "\n" * bool(taken["content"]) + calls
    return taken


def template_arguments(body: ChatRequest) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    for name in arguments:
        if name in RESERVED or name == "self":
            raise RequestError(f"`chat_template_kwargs` may not set `{name}`.", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return arguments


def _template_message(message: Message, at: int) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"`messages[{at}].role` must be one of {', '.join(ROLES)}.", param="messages", code="invalid_role"
        )
    if message.function_call is not None:
        raise RequestError(
            f"`messages[{at}].function_call`: this form is out of date; use `tool_calls` and the role `tool`.",
            param="messages",
            code="unsupported_parameter",
        )
    # Hardly any template knows the newer name for the same role.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message.content, at)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, at) for call in message.tool_calls]
    return plain


def _text(content: str | list[Part] | None, at: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type == "text" and part.text is None:
            raise RequestError(f"`messages[{at}].content`: a part of type `text` needs a `text`.", param="messages")
        if part.text is None or part.type != "text":
            raise RequestError(
                f"`messages[{at}].content`: this model reads text only, not parts of type `{part.type[:50]}`.",
                param="messages",
                code="unsupported_content",
            )
    return "\n".join(part.text for part in content)


def _tool_call(call: dict[str, Any], at: int) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text, templates want the object. What is no object stays text."""
    match call.get("function"):
        case {"name": str(), **rest} as function if isinstance(rest.get("arguments"), str | dict | None):
            pass
        case _:
            raise RequestError(
                f"`messages[{at}].tool_calls`: each needs a `function` with a `name` and its `arguments` as a string.",
                param="messages",
            )
    text = _arguments_text(call)
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        arguments = text
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments_text(call: dict[str, Any]) -> str:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments.strip() if arguments and arguments.strip() else "{}"
