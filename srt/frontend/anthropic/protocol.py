"""L1, frontend: the body of /v1/messages, as typed structures. Blocks may have members that we do not read."""

from __future__ import annotations

from typing import Any

import msgspec

from srt.frontend.protocol import Ignored


class Block(msgspec.Struct):
    """One block of content; which members it has goes by its type."""

    type: str
    text: str | None = None  # of text
    thinking: str | None = None  # of thinking
    id: str | None = None  # of tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of tool_result
    content: str | list[Block] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/messages/count_tokens: what a prompt is made of."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    # without effect here
    cache_control: Ignored = msgspec.UNSET
    context_management: Ignored = msgspec.UNSET
    mcp_servers: Ignored = msgspec.UNSET
    output_config: Ignored = msgspec.UNSET


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    priority: int | None = None
    cache_salt: str | None = None

    container: Ignored = msgspec.UNSET
    inference_geo: Ignored = msgspec.UNSET
    metadata: Ignored = msgspec.UNSET
    service_tier: Ignored = msgspec.UNSET
