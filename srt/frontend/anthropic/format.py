"""L1, frontend: how answers of /v1/messages are written: blocks of thinking, text and tool use in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from srt.frontend.chat_answer import ChatAnswer
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.pieces import Arguments, CallStart, Content, Piece, Reasoning
from srt.frontend.parsing.tool_calls import new_call_id
from srt.frontend.services import Services
from srt.frontend.words import ChatPrompt
from srt.messages import TextDelta

_MEMBERS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_DELTAS["tool_use"] = ("input_json_delta", "partial_json")


class MessageFormat:
    def __init__(self, services: Services, chat: ChatPrompt, answer: AnswerFormat, name: str) -> None:
        self._name = name
        self._model = services.model_name
        self._said = ChatAnswer(services.words, chat, answer)
        self._calls = answer.calls
        self._begun = False
        self._num_blocks = 0
        self._open = ""  # the type of the block that may go on
        self._text_head = b""  # of the open text block's deltas

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> dict[str, Any]:
        generation = generations[0]
        blocks: list[dict[str, Any]] = []
        for piece in self._said.feed(generation, answers[0]):
            kind, text, is_new = self._place(piece)
            if is_new:
                blocks.append(self._new_block(kind, piece))
                self._open = kind
            if kind == "tool_use":
                blocks[-1]["input"] += text
            else:
                blocks[-1][_MEMBERS[kind]] += text
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["input"])
        return {**self._message(blocks), **self._end(generation), "usage": _usage(generation)}

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        events = []
        if not self._begun:
            self._begun = True
            message = {**self._message([]), "stop_reason": None, "stop_sequence": None}
            message["usage"] = {**_usage(generation), "output_tokens": 0}
            events.append(_event("message_start", message=message))
        for piece in self._said.feed(generation, delta):
            events += self._show(piece)
        if delta.finish is not None:
            events.append(self._close())
            events.append(_event("message_delta", delta=self._end(generation), usage=_usage(generation)))
        return b"".join(events)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return _event("message_stop")

    def failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.anthropic_body()

    def _place(self, piece: Piece) -> tuple[str, str, bool]:
        """The kind of block that a piece belongs to, what it adds, and whether the block is a new one."""
        match piece:
            case Content(text):
                return "text", text, self._open != "text"
            case Reasoning(text):
                return "thinking", text, self._open != "thinking"
            case CallStart():
                return "tool_use", "", True
            case Arguments(_, text):
                return "tool_use", text, False

    def _show(self, piece: Piece) -> list[bytes]:
        kind, text, is_new = self._place(piece)
        events = []
        if is_new:
            events.append(self._close())
            block = self._new_block(kind, piece)
            if kind == "tool_use":
                block["input"] = {}
            index = self._num_blocks
            events.append(_event("content_block_start", index=index, content_block=block))
            self._num_blocks += 1
            self._open = kind
            name, member = _DELTAS[kind]
            start = {"type": "content_block_delta", "index": index, "delta": {"type": name}}
            self._text_head = b'event: content_block_delta\ndata: %b,"%b":' % (
                msgspec.json.encode(start)[:-2], member.encode(),
            )  # fmt: skip
        if text:
            events.append(b"%b%b}}\n\n" % (self._text_head, msgspec.json.encode(text)))
        return events

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":  # clients keep one, and send it back
            delta = {"type": "signature_delta", "signature": ""}
            signature = _event("content_block_delta", index=self._num_blocks - 1, delta=delta)
        self._open = ""
        return signature + _event("content_block_stop", index=self._num_blocks - 1)

    def _new_block(self, kind: str, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, CallStart):
            return {"type": kind, "id": new_call_id(self._calls, "toolu_"), "name": piece.name, "input": ""}
        block = {"type": kind, _MEMBERS[kind]: ""}
        if kind == "thinking":
            block["signature"] = ""
        return block

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._name, "type": "message", "role": "assistant", "model": self._model, "content": blocks}

    def _end(self, generation: Generation) -> dict[str, Any]:
        finish = generation.finish
        if finish.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._said.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(finish.matched, bytes):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched.decode("utf-8", "replace")}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _arguments(text: str) -> dict[str, Any]:
    """Cut short they are no JSON, and nothing else may stand here."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _usage(generation: Generation) -> dict[str, Any]:
    """Input tokens are those that were not in the cache, as Anthropic counts them."""
    return {
        "input_tokens": generation.prompt.num_tokens - generation.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.cached_tokens,
        "output_tokens": generation.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
