"""L1, frontend: how responses are written: items of reasoning, text and calls, and the events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from srt.frontend.chat_answer import ChatAnswer
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.openai.responses_protocol import ResponsesRequest
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.pieces import Arguments, CallStart, Content, Piece, Reasoning
from srt.frontend.parsing.tool_calls import new_call_id
from srt.frontend.protocol import Message
from srt.frontend.services import Services, new_id
from srt.frontend.words import ChatPrompt
from srt.messages import TextDelta, unpack_ids


class ResponseFormat:
    def __init__(
        self, services: Services, chat: ChatPrompt, answer: AnswerFormat, name: str, body: ResponsesRequest
    ) -> None:
        self.on_end: Callable[[dict[str, Any], Message], None] = lambda response, said: None
        self._texts = services.texts
        self._name = name
        self._asked = _asked(services, name, body)
        self._said = ChatAnswer(services.words, chat, answer)
        self._calls = answer.calls
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it goes on
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not shown yet
        self._sequence = 0
        self._created = False

    # ---- in one piece ----------------------------------------------------------------------------------------------

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> dict[str, Any]:
        self._take(generations[0], answers[0])
        return self._finished(generations[0])

    def unfinished(self, status: str) -> dict[str, Any]:
        return {
            **self._asked, "status": status, "output": [], "usage": None, "error": None, "incomplete_details": None
        }  # fmt: skip

    def failed(self, error: RequestError) -> dict[str, Any]:
        described = {"code": "server_error", "message": error.message}
        return {**self.unfinished("failed"), "output": self._items, "error": described}

    def _finished(self, generation: Generation) -> dict[str, Any]:
        response = {**self.unfinished("completed"), "output": self._items, "usage": _usage(generation)}
        if generation.finish.reason == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        elif generation.finish.reason == "abort":
            response["status"] = "cancelled"
        self.on_end(response, self._as_message())
        return response

    # ---- streamed --------------------------------------------------------------------------------------------------

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        events = []
        if not self._created:
            self._created = True
            response = self.unfinished("in_progress")
            events += [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        return b"".join([*events, *self._take(generation, delta)])

    def tail(self, generations: Sequence[Generation]) -> bytes:
        response = self._finished(generations[0])
        kind = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
        return self._event(f"response.{kind}", response=response)

    def failure(self, error: RequestError) -> bytes:
        return self._event("response.failed", response=self.failed(error))

    # ----------------------------------------------------------------------------------------------------------------

    def _take(self, generation: Generation, delta: TextDelta) -> list[bytes]:
        """Adds what an answer's next part says to the items; the events that tell of it."""
        if delta.logprobs is not None:
            self._logprobs += self._texts.chat(delta.logprobs, unpack_ids(delta.ids))["content"]
        pieces = self._said.feed(generation, delta)
        if pieces and not any(isinstance(piece, Content) for piece in pieces):
            self._logprobs = []  # only text is shown with them
        events = []
        for piece in pieces:
            events += self._add(piece)
        if delta.finish is not None:
            events += self._close("incomplete" if delta.finish.reason == "length" else "completed")
        return events

    def _add(self, piece: Piece) -> list[bytes]:
        match piece:
            case Content(text):
                events = self._opened("message")
                logprobs, self._logprobs = self._logprobs, []
                part = self._open["content"][0]
                part["text"] += text
                part["logprobs"] += logprobs
                return [*events, self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)]
            case Reasoning(text):
                events = self._opened("reasoning")
                self._open["content"][0]["text"] += text
                return [*events, self._part_event("response.reasoning_text.delta", delta=text)]
            case CallStart(_, name):
                events = self._close("completed")
                return events + self._begin(
                    {"type": "function_call", "id": new_id("fc_"), "call_id": new_call_id(self._calls), "name": name,
                     "arguments": "", "status": "in_progress"}
                )  # fmt: skip
            case Arguments(_, text):
                self._open["arguments"] += text
                return [self._item_event("response.function_call_arguments.delta", delta=text)]

    def _opened(self, kind: str) -> list[bytes]:
        """Sees to it that an item of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg_"), "role": "assistant", "status": "in_progress", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "id": new_id("rs_"), "summary": [], "status": "in_progress", "content": []}
        events += self._begin(item)
        item["content"].append(part)
        return [*events, self._part_event("response.content_part.added", part=part)]

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        self._items.append(item)
        self._open = item
        return [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]

    def _close(self, status: str) -> list[bytes]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            done = self._item_event("response.function_call_arguments.done", arguments=arguments, name=item["name"])
            events = [done]
        else:
            part = item["content"][0]
            kind, more = part["type"], {}
            if kind == "output_text":
                part["logprobs"] += self._logprobs
                self._logprobs, more = [], {"logprobs": part["logprobs"]}
            events = [
                self._part_event(f"response.{kind}.done", text=part["text"], **more),
                self._part_event("response.content_part.done", part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        self._open = None
        return events

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _as_message(self) -> Message:
        """What the answer is in the turns to come."""
        texts = {"message": "", "reasoning": ""}
        calls = []
        for item in self._items:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            else:
                texts[item["type"]] += item["content"][0]["text"]
        return Message(
            "assistant", texts["message"], tool_calls=calls or None, reasoning_content=texts["reasoning"] or None
        )


def _asked(services: Services, name: str, body: ResponsesRequest) -> dict[str, Any]:
    """What a response says of its request."""
    defaults = services.sampling_defaults
    reasoning, text = body.reasoning, body.text
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": services.model_name,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None, "summary": reasoning.summary if reasoning else None
        },
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }  # fmt: skip


def _usage(generation: Generation) -> dict[str, Any]:
    prompt_tokens, output_tokens = generation.prompt.num_tokens, generation.completion_tokens
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }
