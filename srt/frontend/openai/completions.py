"""L1, main process: /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.constraints import form_of
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Generation, Prompt
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import Envelope, check_request, finish_fields
from srt.frontend.protocol import NULL, CompletionRequest
from srt.frontend.services import Services, check_priority, check_rid, new_id
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
        prompts = await self._prompts(body, name, services.owner(request))
        return await services.respond(request, prompts, CompletionFormat(services, name, body), bool(body.stream))

    async def _prompts(self, body: CompletionRequest, name: str, owner: bytes) -> list[Prompt]:
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
        grammar = await self._services.constraints.grammar(form_of(body))
        texts, ids, _ = prompt_texts_or_ids(body.prompt, "prompt", words.vocab_size)
        if texts:
            ids = await words.encode(texts, add_special_tokens=body.add_special_tokens is not False)
        if not ids:
            raise RequestError("`prompt` must not be empty.", param="prompt")
        space = namespace(body.cache_salt, body.extra_key, owner)
        priority = check_priority(body.priority)
        if len(ids) == 1:
            return [Prompt(name, ids[0], spec, space, priority, grammar=grammar)]
        return [Prompt(f"{name}_{i}", prompt, spec, space, priority, name, grammar) for i, prompt in enumerate(ids)]


class CompletionFormat:
    def __init__(self, services: Services, name: str, body: CompletionRequest) -> None:
        self._envelope = Envelope(name, "text_completion", "text_completion", services.model_name, body.stream_options)
        self._texts = services.texts
        self._eos = services.model.eos_token_ids
        self._offsets: dict[Generation, int] = {}
        self._head = self._envelope.head + b'{"index":'
        rest = b',"logprobs":null,"finish_reason":null,"matched_stop":null,"stop_reason":null}'
        self._plain_rest = rest + self._envelope.rest

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> dict[str, Any]:
        choices = []
        for generation, answer in zip(generations, answers, strict=True):
            logprobs = None
            if generation.logprobs >= 0:
                logprobs = self._texts.completion(answer.logprobs or NO_LOGPROBS, unpack_ids(answer.ids), 0)
            finish = finish_fields(generation.finish, self._eos)
            choices.append({"index": generation.index, "text": answer.text, "logprobs": logprobs, **finish})
        return self._envelope.answer(choices, generations)

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        if delta.finish is None and delta.logprobs is None and not self._envelope.continuous_usage:
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
        return self._envelope.event(choice, generation)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return self._envelope.tail(generations)
