"""L1, main process: /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Collector, Generation, Prompt, join
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import check_request, finish_fields, usage
from srt.frontend.openai.messages import template_arguments, template_messages
from srt.frontend.protocol import ChatRequest
from srt.frontend.sampling import SamplingSpec
from srt.frontend.services import Services, check_priority, check_rid, json_response, new_id
from srt.frontend.streaming import Stream
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
        spec, chat = self._sampling(body), await self._chat(body)
        prompt = Prompt(name, chat.ids, spec, chat.namespace, check_priority(body.priority))
        form = ChatFormat(services, chat, name, body)
        if body.stream:
            return await Stream(form).respond(request, services.manager, [prompt])
        collector = Collector([prompt])
        with services.manager.running([prompt], collector) as generations:
            await collector.done
        return json_response(form.body(generations, collector.answers))

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

    async def _chat(self, body: ChatRequest) -> ChatPrompt:
        continue_final = bool(body.continue_final_message)
        return await self._services.words.encode_chat(
            template_messages(body.messages),
            add_generation_prompt=not continue_final
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=continue_final,
            arguments=template_arguments(body),
            namespace=namespace(body.cache_salt, body.extra_key),
        )


class ChatFormat:
    def __init__(self, services: Services, chat: ChatPrompt, name: str, body: ChatRequest) -> None:
        options = body.stream_options
        self._words = services.words
        self._chat = chat
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._texts = services.texts
        self._eos = services.model.eos_token_ids
        self._said: dict[int, list[TextDelta]] = {}  # by index, of the choices that have begun
        self._base = {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": services.model_name,
        }
        self._chunk_base = {**self._base, "object": "chat.completion.chunk"}
        encoded = msgspec.json.encode(self._chunk_base)[:-1]
        self._head = b"data: " + encoded + b',"choices":[{"index":'
        rest = b'},"logprobs":null,"finish_reason":null}]'
        self._plain_rest = rest + (b',"usage":null}\n\n' if self._include_usage else b"}\n\n")
        self._usage_head = b"data: " + encoded + b',"choices":[],"usage":'

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
        return {**self._base, "choices": choices, "usage": usage(generations)}

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        index = generation.index
        said = self._said.get(index)
        if said is not None:
            said.append(delta)
        if said and delta.finish is None and delta.logprobs is None and not self._continuous_usage:
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
        if not self._include_usage:
            return b""
        return b"%b%b}\n\n" % (self._usage_head, msgspec.json.encode(usage(generations)))

    def _event(
        self,
        generation: Generation,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": generation.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        event = {**self._chunk_base, "choices": [choice | (finish or {})]}
        if self._continuous_usage:
            event["usage"] = usage([generation])
        elif self._include_usage:
            event["usage"] = None
        return b"data: %b\n\n" % msgspec.json.encode(event)
