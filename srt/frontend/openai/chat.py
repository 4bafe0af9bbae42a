"""L1, main process: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.constraints import form_of
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Generation, Prompt, join
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import Envelope, check_request, finish_fields
from srt.frontend.openai.messages import template_arguments, template_messages
from srt.frontend.protocol import ChatRequest
from srt.frontend.sampling import SamplingSpec
from srt.frontend.services import Services, check_priority, check_rid, new_id
from srt.frontend.words import ChatPrompt, namespace
from srt.messages import TextDelta, unpack_ids


class Chat:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: web.Request) -> web.StreamResponse:
        services = self._services
        services.manager.check_open()
        body: ChatRequest = await services.read(request, ChatRequest)
        check_request(body, services)
        if body.tools and body.tool_choice != "none":
            raise unsupported("tools", "tool calling is not available on this server; `tool_choice` may be `none`")
        name = check_rid(body.rid or body.request_id) or new_id("chatcmpl-")
        spec, priority = self._sampling(body), check_priority(body.priority)
        grammar = await services.constraints.grammar(form_of(body))
        chat = await self._chat(body, services.owner(request))
        prompt = Prompt(name, chat.ids, spec, chat.namespace, priority, grammar=grammar)
        return await services.respond(request, [prompt], ChatFormat(services, chat, name, body), bool(body.stream))

    def _sampling(self, body: ChatRequest) -> SamplingSpec:
        top = sampling.check_top_logprobs(body.top_logprobs, "top_logprobs", sampling.MAX_TOP_LOGPROBS)
        if top and not body.logprobs:
            raise RequestError("`top_logprobs` goes with `logprobs`: true.", param="top_logprobs")
        max_tokens = (body.max_tokens, "max_tokens")
        if body.max_completion_tokens is not None:
            max_tokens = (body.max_completion_tokens, "max_completion_tokens")
        return sampling.from_openai(
            body,
            vocab_size=self._services.words.vocab_size,
            max_tokens=max_tokens,
            default_max_new_tokens=None,
            logprobs=top if body.logprobs else -1,
        )

    async def _chat(self, body: ChatRequest, owner: bytes) -> ChatPrompt:
        continue_final = bool(body.continue_final_message)
        return await self._services.words.encode_chat(
            template_messages(body.messages),
            add_generation_prompt=not continue_final
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=continue_final,
            arguments=template_arguments(body),
            namespace=namespace(body.cache_salt, body.extra_key, owner),
        )


class ChatFormat:
    def __init__(self, services: Services, chat: ChatPrompt, name: str, body: ChatRequest) -> None:
        self._envelope = Envelope(
            name, "chat.completion", "chat.completion.chunk", services.model_name, body.stream_options
        )
        self._words = services.words
        self._chat = chat
        self._texts = services.texts
        self._eos = services.model.eos_token_ids
        self._said: dict[int, list[TextDelta]] = {}  # by index, of the choices that have begun
        self._head = self._envelope.head + b'{"index":'
        self._plain_rest = b'},"logprobs":null,"finish_reason":null}' + self._envelope.rest

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> dict[str, Any]:
        choices = []
        for generation, answer in zip(generations, answers, strict=True):
            self._words.was_said(self._chat, answer)
            logprobs = None
            if generation.logprobs >= 0:
                logprobs = self._texts.chat(answer.logprobs or NO_LOGPROBS, unpack_ids(answer.ids))
            message = {
                "role": "assistant", "content": answer.text, "reasoning_content": None, "tool_calls": None
            }  # fmt: skip
            finish = finish_fields(generation.finish, self._eos)
            choices.append({"index": generation.index, "message": message, "logprobs": logprobs, **finish})
        return self._envelope.answer(choices, generations)

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        index = generation.index
        said = self._said.get(index)
        if said is not None:
            said.append(delta)
        if said and delta.finish is None and delta.logprobs is None and not self._envelope.continuous_usage:
            if not delta.text:
                return b""
            text = msgspec.json.encode(delta.text)
            return b'%b%d,"delta":{"content":%b%b' % (self._head, index, text, self._plain_rest)
        events = []
        if said is None:
            said = self._said[index] = [delta]
            events.append(self._event(generation, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs is not None:
            logprobs = None
            if delta.logprobs is not None:
                logprobs = self._texts.chat(delta.logprobs, unpack_ids(delta.ids))
            events.append(self._event(generation, {"content": delta.text}, logprobs))
        if delta.finish is not None:
            self._words.was_said(self._chat, join(said))
            events.append(self._event(generation, {}, finish=finish_fields(delta.finish, self._eos)))
        return b"".join(events)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return self._envelope.tail(generations)

    def _event(
        self,
        generation: Generation,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": generation.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._envelope.event(choice | (finish or {}), generation)
