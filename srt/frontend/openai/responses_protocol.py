"""L1, frontend: the body of /v1/responses, as typed structures. Items may have members that we do not read."""

from __future__ import annotations

from typing import Any

import msgspec

from srt.frontend.protocol import Ignored


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Item(msgspec.Struct):
    """One item of the input; which members it has goes by its type."""

    type: str | None = None  # none: a message
    role: str | None = None
    content: str | list[ContentPart] | None = None  # of messages, and of reasoning
    summary: list[ContentPart] | None = None
    call_id: str | None = None  # of calls and their outputs
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncation: str | None = None

    # not built
    conversation: Any = None
    max_tool_calls: Any = None
    prompt: Any = None

    # without effect here
    include: Ignored = msgspec.UNSET
    prompt_cache_key: Ignored = msgspec.UNSET
    prompt_cache_retention: Ignored = msgspec.UNSET
    request_id: Ignored = msgspec.UNSET
    safety_identifier: Ignored = msgspec.UNSET
    service_tier: Ignored = msgspec.UNSET
    user: Ignored = msgspec.UNSET
