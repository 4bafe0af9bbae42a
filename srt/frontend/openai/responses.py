"""L1, main process: /v1/responses. What it asks becomes a chat request like any other. Owns the store of responses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from srt.frontend.answers import Answer, Response, json_response
from srt.frontend.errors import RequestError, renaming, unsupported
from srt.frontend.generation import Prompt
from srt.frontend.openai.chat import Chat
from srt.frontend.openai.messages import ROLES
from srt.frontend.openai.responses_format import ResponseFormat
from srt.frontend.openai.responses_protocol import ContentPart, Item, ResponsesRequest
from srt.frontend.protocol import ChatRequest, Message
from srt.frontend.services import ID, Services, new_id

MAX_STORED = 1024  # responses
MAX_STORED_BYTES = 64 * 2**20

NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Of what a chat calls otherwise."""

log = logging.getLogger(__name__)


@dataclass
class Stored:
    """A response that may be read, or gone on from."""

    owner: bytes
    body: dict[str, Any]
    messages: list[Message]  # of the whole chat, the answer included
    task: asyncio.Task[None] | None = None  # of one that is made in the background
    size: int = 0


class Store:
    """The responses of late, in any thread. The oldest go first, whoever they belong to."""

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._responses: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, stored: Stored) -> None:
        name = stored.body["id"]
        stored.size = len(msgspec.json.encode((stored.body, stored.messages)))
        with self._changing:
            self.drop(name)
            self._responses[name] = stored
            self._size += stored.size
            while len(self._responses) > MAX_STORED or self._size > MAX_STORED_BYTES:
                self.drop(next(iter(self._responses)))

    def drop(self, name: str) -> None:
        with self._changing:
            stored = self._responses.pop(name, None)
            if stored is not None:
                self._size -= stored.size

    def get(self, name: str, owner: bytes) -> Stored:
        """RequestError with 404 for one that is not there or is another's."""
        stored = self._responses.get(name)
        if stored is None or stored.owner != owner:
            raise RequestError(
                f"There is no response `{name[:100]}`: it was not stored, or it was too long ago.",
                status=404, code="response_not_found",
            )  # fmt: skip
        return stored


class Responses:
    def __init__(self, services: Services, chat: Chat) -> None:
        self._services = services
        self._chat = chat
        self._store = Store()

    async def create(self, request: web.Request) -> Response:
        services = self._services
        services.manager.check_open()
        body, asked = await services.read(request, ResponsesRequest, _with_messages)
        owner = services.owner(request)
        if body.background and (body.stream or body.store is False):
            raise RequestError("`background` goes with `store`, and not with `stream`.", param="background")
        earlier = []
        if body.previous_response_id:
            earlier = self._store.get(body.previous_response_id, owner).messages
            if not earlier:
                raise RequestError("The previous response is not complete.", param="previous_response_id")
        messages = [*earlier, *asked]
        name = new_id("resp_")
        with renaming(NAMES):
            call = await self._chat.accept(chat_request(body, messages), name, owner)
        form = ResponseFormat(services, call.chat, call.answer, name, body)

        def finished(response: dict[str, Any], said: Message) -> None:
            if body.store is not False:
                self._store.put(Stored(owner, response, [*messages, said]))

        form.on_end = finished
        if not body.background:
            return await services.respond(request, [call.prompt], form, bool(body.stream))
        begun = form.unfinished("in_progress")
        answer = json_response(begun)
        task = asyncio.create_task(self._in_background(call.prompt, form, owner))
        self._store.put(Stored(owner, begun, [], task))
        return answer

    async def get(self, request: web.Request) -> Answer:
        return json_response(self._named(request).body)

    async def delete(self, request: web.Request) -> Answer:
        stored = self._named(request)
        await self._end(stored)
        name = stored.body["id"]
        self._store.drop(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> Answer:
        stored = self._named(request)
        if stored.task is None:
            if stored.body["background"]:
                return json_response(stored.body)
            raise RequestError("Only a response that is made in the background can be cancelled.")
        await self._end(stored)
        return json_response(self._named(request).body)

    def _named(self, request: web.Request) -> Stored:
        return self._store.get(request[ID], self._services.owner(request))

    async def _end(self, stored: Stored) -> None:
        """Of one that is made in the background. With its end it is stored once more."""
        if stored.task is not None:
            self._services.manager.abort(stored.body["id"], "The response was cancelled.")
            await asyncio.wait([stored.task])

    async def _in_background(self, prompt: Prompt, form: ResponseFormat, owner: bytes) -> None:
        try:
            await self._services.answer([prompt], form)
        except RequestError as error:
            self._store.put(Stored(owner, form.failed(error), []))
        except Exception:
            log.exception("A response in the background failed")
            error = RequestError("The server made a mistake; its log says which.", status=500)
            self._store.put(Stored(owner, form.failed(error), []))


def chat_request(body: ResponsesRequest, messages: Sequence[Message]) -> ChatRequest:
    """RequestError for what a chat cannot say."""
    for name in ("conversation", "max_tool_calls", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(name, "this is not available on this server")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "prompts are not truncated by this server")
    if body.instructions:
        messages = [Message("system", body.instructions), *messages]
    chat = ChatRequest(
        messages=list(messages),
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool, at) for at, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    for name in (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "top_logprobs",
    ):  # fmt: skip
        setattr(chat, name, getattr(body, name))
    chat.logprobs = True if body.top_logprobs is not None else None
    return chat


def _with_messages(body: ResponsesRequest) -> tuple[ResponsesRequest, list[Message]]:
    return body, list(input_messages(body.input))


def input_messages(given: str | list[Item]) -> Iterator[Message]:
    """Calls and reasoning go with the message that they stand next to, as one turn of the assistant."""
    if isinstance(given, str):
        yield Message("user", given)
        return
    messages = map(_message, given, itertools.count())
    for are_assistants, turn in itertools.groupby(messages, key=lambda message: message.role == "assistant"):
        if are_assistants:
            yield _joined(list(turn))
        else:
            yield from turn


def _joined(turn: Sequence[Message]) -> Message:
    return Message(
        "assistant",
        "\n".join([message.content for message in turn if message.content]),
        tool_calls=[call for message in turn for call in message.tool_calls or ()] or None,
        reasoning_content="".join([message.reasoning_content or "" for message in turn]) or None,
    )


def _message(item: Item, at: int) -> Message:
    match item.type or "message":
        case "message" if item.role and item.role not in ROLES:
            raise RequestError(f"`input[{at}].role` must be one of {', '.join(ROLES)}.", param="input")
        case "message" if item.role and item.content is not None:
            return Message(item.role, _text(item.content, at))
        case "function_call" if item.name and item.call_id:
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            return Message("assistant", tool_calls=[{"id": item.call_id, "type": "function", "function": function}])
        case "function_call_output" if item.call_id and item.output is not None:
            return Message("tool", _text(item.output, at), tool_call_id=item.call_id)
        case "reasoning":
            return Message("assistant", reasoning_content=_text(item.content or item.summary or "", at) or None)
        case "message" | "function_call" | "function_call_output" as kind:
            raise RequestError(f"`input[{at}]`: a `{kind}` lacks a member that it needs.", param="input")
        case kind:
            raise RequestError(f"`input[{at}]`: items of type `{kind[:50]}` are not read here.", param="input")


def _text(content: str | list[ContentPart], at: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None:
            kind = part.type[:50]
            fault = f"a part of type `{kind}` needs a `text`"
            if not kind.endswith("text"):
                fault = f"this model reads text only, not parts of type `{kind}`"
            raise RequestError(f"`input[{at}]`: {fault}.", param="input")
    return "\n".join(part.text or "" for part in content)


def _tool(tool: dict[str, Any], at: int) -> dict[str, Any]:
    """Here a function's members stand beside its type."""
    if tool.get("type") != "function":
        raise RequestError(f"`tools[{at}]`: only functions can be called.", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case None | "none" | "auto" | "required" | {"type": "function", "function": {}}:
            return choice
    raise RequestError(
        '`tool_choice` must be `none`, `auto`, `required` or {"type": "function", "name": …}.', param="tool_choice"
    )


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    asked = None if body.text is None else body.text.format
    if asked is None or asked.get("type") != "json_schema":
        return asked
    described = {key: value for key, value in asked.items() if key != "type"}
    return {"type": "json_schema", "json_schema": described}
