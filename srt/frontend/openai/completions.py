"""L1, main process: /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Collector, Generation, Prompt
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import check_request, finish_fields, usage
from srt.frontend.protocol import NULL, CompletionRequest
from srt.frontend.services import Services, check_priority, check_rid, json_response, new_id
from srt.frontend.streaming import Stream
from srt.frontend.words import namespace, prompt_texts_or_ids
from srt.messages import TextDelta, unpack_ids

DEFAULT_MAX_TOKENS = 16


class Completions:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: web.Request) -> web.StreamResponse:
        services = self._services
        services.manager.check_open()
        body: CompletionRequest = await services.read(request, CompletionRequest)
        check_request(body, services)
        name = check_rid(body.rid or body.request_id) or new_id("cmpl-")
        prompts = await self._prompts(body, name)
        form = CompletionFormat(services, name, body)
        if body.stream:
            return await Stream(form).respond(request, services.manager, prompts)
        collector = Collector(prompts)
        with services.manager.running(prompts, collector) as generations:
            await collector.done
        return json_response(form.body(generations, collector.answers))

    async def _prompts(self, body: CompletionRequest, name: str) -> list[Prompt]:
        words = self._services.words
        if body.prompt == NULL:
            raise RequestError("`prompt` is missing.", param="prompt")
        logprobs = -1
        if body.logprobs is not None:
            logprobs = sampling.check_top_logprobs(body.logprobs, "logprobs", sampling.MAX_TOP_LOGPROBS)
        spec = sampling.from_openai(
            body,
            vocab_size=words.vocab_size,
            max_tokens=(body.max_tokens, "max_tokens"),
            default_max_new_tokens=DEFAULT_MAX_TOKENS,
            logprobs=logprobs,
        )
        if body.best_of is not None and body.best_of != spec.n:
            raise unsupported("best_of", "all choices are returned by this server; ask for them with `n`")
        texts, ids, _ = prompt_texts_or_ids(body.prompt, "prompt", words.vocab_size)
        if texts:
            ids = await words.encode(texts, add_special_tokens=body.add_special_tokens is not False)
        if not ids:
            raise RequestError("`prompt` must not be empty.", param="prompt")
        space = namespace(body.cache_salt, body.extra_key)
        priority = check_priority(body.priority)
        if len(ids) == 1:
            return [Prompt(name, ids[0], spec, space, priority)]
        return [Prompt(f"{name}_{i}", prompt, spec, space, priority, name) for i, prompt in enumerate(ids)]


class CompletionFormat:
    def __init__(self, services: Services, name: str, body: CompletionRequest) -> None:
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._texts = services.texts
        self._eos = services.model.eos_token_ids
        self._offsets: dict[Generation, int] = {}
        self._base = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": services.model_name,
        }
        encoded = msgspec.json.encode(self._base)[:-1]
        self._head = b"data: " + encoded + b',"choices":[{"index":'
        rest = b',"logprobs":null,"finish_reason":null,"matched_stop":null,"stop_reason":null}]'
        self._plain_rest = rest + (b',"usage":null}\n\n' if self._include_usage else b"}\n\n")
        self._usage_head = b"data: " + encoded + b',"choices":[],"usage":'

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> dict[str, Any]:
        choices = []
        for generation, answer in zip(generations, answers, strict=True):
            logprobs = None
            if generation.logprobs >= 0:
                logprobs = self._texts.completion(answer.logprobs or NO_LOGPROBS, unpack_ids(answer.ids), 0)
            finish = finish_fields(generation.finish, self._eos)
            choices.append({"index": generation.index, "text": answer.text, "logprobs": logprobs, **finish})
        return {**self._base, "choices": choices, "usage": usage(generations)}

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        if delta.finish is None and delta.logprobs is None and not self._continuous_usage:
            if not delta.text:
                return b""
            text = msgspec.json.encode(delta.text)
            return b'%b%d,"text":%b%b' % (self._head, generation.index, text, self._plain_rest)
        choice = {"index": generation.index, "text": delta.text, "logprobs": None}
        if delta.logprobs is not None:
            offset = self._offsets.get(generation, 0)
            logprobs = self._texts.completion(delta.logprobs, unpack_ids(delta.ids), offset)
            self._offsets[generation] = offset + sum(map(len, logprobs["tokens"]))
            choice["logprobs"] = logprobs
        choice.update(finish_fields(delta.finish, self._eos))
        event = {**self._base, "choices": [choice]}
        if self._continuous_usage:
            event["usage"] = usage([generation])
        elif self._include_usage:
            event["usage"] = None
        return b"data: %b\n\n" % msgspec.json.encode(event)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        if not self._include_usage:
            return b""
        return b"%b%b}\n\n" % (self._usage_head, msgspec.json.encode(usage(generations)))
