"""L1, main process: from a client's chat messages to what a chat template is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from srt.chat_template import RESERVED
from srt.frontend.errors import RequestError
from srt.frontend.protocol import ChatRequest, Message, Part

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain dictionaries with text only. RequestError for an unknown role or a part that is not text."""
    if not messages:
        raise RequestError("`messages` must not be empty.", param="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


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
    # Hardly any template knows the newer name for the same role.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message.content, at)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _text(content: str | list[Part] | None, at: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"`messages[{at}].content`: this model reads text only, not parts of type `{part.type[:50]}`.",
                param="messages",
                code="unsupported_content",
            )
    return "\n".join(part.text for part in content)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text, templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
