"""L1, frontend: /v1/messages, Anthropic's form of a chat. What it asks becomes a chat request like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from srt.frontend.answers import Answer, Response, json_response
from srt.frontend.anthropic.format import MessageFormat
from srt.frontend.anthropic.protocol import Block, CountTokensRequest, InputMessage, MessagesRequest, Tool, ToolChoice
from srt.frontend.errors import RequestError, renaming
from srt.frontend.openai.chat import Chat
from srt.frontend.protocol import ChatRequest, Message
from srt.frontend.services import Services, new_id

NAMES = {"stop": "stop_sequences", "parameters": "input_schema"}
"""Of what a chat calls otherwise."""
READ_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Messages:
    def __init__(self, services: Services, chat: Chat) -> None:
        self._services = services
        self._chat = chat

    async def create(self, request: web.Request) -> Response:
        services = self._services
        services.manager.check_open()
        chat: ChatRequest = await services.read(request, MessagesRequest, chat_request)
        name = new_id("msg_")
        with renaming(NAMES):
            call = await self._chat.accept(chat, name, services.owner(request))
        form = MessageFormat(services, call.chat, call.answer, name)
        return await services.respond(request, [call.prompt], form, bool(chat.stream))

    async def count_tokens(self, request: web.Request) -> Answer:
        services = self._services
        chat: ChatRequest = await services.read(request, CountTokensRequest, prompt_request)
        with renaming(NAMES):
            prompt = await self._chat.prompt(chat, services.owner(request))
        return json_response({"input_tokens": len(prompt.ids) // 4})


def chat_request(body: MessagesRequest) -> ChatRequest:
    chat = prompt_request(body)
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature = body.temperature
    chat.top_p = body.top_p
    chat.top_k = body.top_k or None
    chat.priority = body.priority
    chat.cache_salt = body.cache_salt
    return chat


def prompt_request(body: CountTokensRequest) -> ChatRequest:
    """What the prompt follows from. RequestError for what a chat cannot say."""
    if not body.messages:
        raise RequestError("`messages` must not be empty.", param="messages")
    messages = [message for at, given in enumerate(body.messages) for message in _messages(given, at)]
    if body.system:
        messages.insert(0, Message("system", _text(body.system, "system")))
    chat = ChatRequest(messages=messages, model=body.model)
    if messages[-1].role == "assistant" and not messages[-1].tool_calls:
        if messages[-1].content:
            chat.continue_final_message = True
        else:  # clients send the place where the answer will stand
            messages.pop()
    if body.tools:
        chat.tools = [_tool(tool, at) for at, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat.tool_choice = _tool_choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": body.thinking.type != "disabled"}
    return chat


def _messages(given: InputMessage, at: int) -> Iterator[Message]:
    """One message may answer calls and go on: then it is several."""
    if given.role not in ("user", "assistant", "system"):
        raise RequestError(f"`messages[{at}].role` must be `user` or `assistant`.", param="messages")
    if isinstance(given.content, str):
        yield Message(given.role, given.content)
        return
    where = f"messages[{at}].content"
    for block in given.content:
        if block.type not in READ_TYPES:
            raise RequestError(
                f"`{where}`: this model reads text only, not blocks of type `{block.type[:50]}`.", param="messages"
            )
    of_type = {kind: [block for block in given.content if block.type == kind] for kind in READ_TYPES}
    for block in of_type["tool_result"]:
        result = "" if block.content is None else _text(block.content, where)
        yield Message("tool", result, tool_call_id=block.tool_use_id)
    texts = [block.text or "" for block in of_type["text"]]
    calls = [_call(block, where) for block in of_type["tool_use"]]
    thinking = "".join(block.thinking or "" for block in of_type["thinking"])
    if texts or calls or not of_type["tool_result"]:
        yield Message(
            given.role, "\n".join(texts), tool_calls=calls or None, reasoning_content=thinking or None
        )  # fmt: skip


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise RequestError(
                f"`{where}`: this model reads text only, not blocks of type `{block.type[:50]}`.", param=where
            )
    return "\n".join(block.text or "" for block in content)


def _call(block: Block, where: str) -> dict[str, Any]:
    if not block.name or not block.id:
        raise RequestError(f"`{where}`: a block of type `tool_use` needs an `id` and a `name`.", param="messages")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: Tool, at: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"`tools[{at}]`: this server runs no tools of type `{tool.type[:50]}`.", param="tools")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool" if choice.name:
            return {"type": "function", "function": {"name": choice.name}}
    raise RequestError("`tool_choice` needs a `type`: auto, any, none, or tool with a `name`.", param="tool_choice")
