"""L1, frontend: how answers to a chat are written, in one piece and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from srt.frontend.chat_answer import ChatAnswer
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import Choice, Completion, Envelope
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.pieces import Arguments, CallStart, Content, Piece, Reasoning
from srt.frontend.parsing.tool_calls import new_call_id
from srt.frontend.protocol import StreamOptions
from srt.frontend.services import Services
from srt.frontend.streaming import DONE, error_event
from srt.frontend.words import ChatPrompt
from srt.messages import Finish, TextDelta, unpack_ids


class ChatFormat:
    def __init__(
        self,
        services: Services,
        chat: ChatPrompt,
        name: str,
        options: StreamOptions | None,
        answer: AnswerFormat,
        timeline: bool = False,
    ) -> None:
        kind = "chat.completion"
        self._envelope = Envelope(name, kind, f"{kind}.chunk", services.model_name, options, timeline)
        self._words = services.words
        self._chat = chat
        self._answer = answer
        self._is_plain = answer.is_plain
        self._texts = services.texts
        self._eos = services.model.eos_token_ids
        self._begun: dict[int, ChatAnswer] = {}  # by index

    @cached_property
    def _head(self) -> bytes:
        return self._envelope.head + b'{"index":'

    @cached_property
    def _rest(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}' + self._envelope.rest

    @cached_property
    def _plain_rest(self) -> bytes:
        return b"}" + self._rest

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> Completion:
        choices = []
        for generation, answer in zip(generations, answers, strict=True):
            logprobs = None
            if generation.logprobs >= 0:
                logprobs = self._texts.chat(answer.logprobs or NO_LOGPROBS, unpack_ids(answer.ids))
            said = self._new_answer()
            message = self._message(said.feed(generation, answer))
            choice = Choice(generation.index, message=message, logprobs=logprobs)
            self._end(choice, generation.finish, said)
            self._envelope.add_timeline(choice, generation)
            choices.append(choice)
        body = self._envelope.answer(choices, generations)
        if generations[0].prompt.spec.prompt_logprobs >= 0:
            ids = unpack_ids(self._chat.ids)
            body.prompt_logprobs = self._texts.prompt_by_id(answers[0].prompt_logprobs or NO_LOGPROBS, ids)
        return body

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        index = generation.index
        said = self._begun.get(index)
        is_short = delta.logprobs is None and not self._envelope.continuous_usage
        if self._is_plain and is_short and said is not None and delta.finish is None:
            said.keep(delta)
            if not delta.text:
                return b""
            text = msgspec.json.encode(delta.text)
            return b'%b%d,"delta":{"content":%b%b' % (self._head, index, text, self._plain_rest)
        events = []
        if said is None:
            said = self._begun[index] = self._new_answer()
            begin = Choice(index, delta={"role": "assistant", "content": ""})
            events.append(self._envelope.event(begin, generation))
        pieces = said.feed(generation, delta)
        if is_short:
            deltas = map(msgspec.json.encode, map(self._delta, pieces))
            events += [b'%b%d,"delta":%b%b' % (self._head, index, one, self._rest) for one in deltas]
        else:
            logprobs = None
            if delta.logprobs is not None:
                logprobs = self._texts.chat(delta.logprobs, unpack_ids(delta.ids))
                pieces = pieces or [Content("")]  # none of the text may be shown yet
            for piece in pieces:
                choice = Choice(index, delta=self._delta(piece), logprobs=logprobs)
                events.append(self._envelope.event(choice, generation))
                logprobs = None
        if delta.finish is not None:
            choice = Choice(index, delta={})
            self._end(choice, delta.finish, said)
            events.append(self._envelope.event(choice, generation))
        return b"".join(events)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return self._envelope.tail(generations) + DONE

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def _new_answer(self) -> ChatAnswer:
        return ChatAnswer(self._words, self._chat, self._answer)

    def _message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        reasoning = "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)])
        calls = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls.append(self._call(piece))
            elif isinstance(piece, Arguments):
                calls[piece.index]["function"]["arguments"] += piece.text
        return {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "reasoning_content": reasoning or None,
            "tool_calls": calls or None,
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart():
                return {"tool_calls": [self._call(piece)]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call(self, start: CallStart) -> dict[str, Any]:
        function = {"name": start.name, "arguments": ""}
        return {
            "index": start.index, "id": new_call_id(self._answer.calls), "type": "function", "function": function
        }  # fmt: skip

    def _end(self, choice: Choice, finish: Finish, said: ChatAnswer) -> None:
        choice.end(finish, self._eos)
        if finish.reason == "stop" and said.called:
            choice.finish_reason = "tool_calls"
