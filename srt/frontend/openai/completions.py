"""L1, frontend: /v1/completions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.answers import Response
from srt.frontend.constraints import Form, form_of
from srt.frontend.decoding import decode
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation, Prompt
from srt.frontend.logprobs import NO_LOGPROBS
from srt.frontend.openai.common import Choice, Completion, Envelope, check_prompt_logprobs, check_request
from srt.frontend.protocol import NULL, CompletionRequest, Fields
from srt.frontend.request_size import check_streamed
from srt.frontend.sampling import LogprobWish, SamplingSpec
from srt.frontend.services import Services, check_priority, check_rid, new_id
from srt.frontend.streaming import DONE, error_event
from srt.frontend.wishes import Wishes
from srt.frontend.words import namespace, prompt_texts_or_ids
from srt.messages import TextDelta, unpack_ids

DEFAULT_MAX_TOKENS = 16
KIND = "text_completion"


class Wish(NamedTuple):
    """All of a body but its prompt, checked."""

    body: CompletionRequest
    rid: str | None
    spec: SamplingSpec
    form: Form | None
    priority: int


class Completions:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._wishes = Wishes(self._wish, services.words)

    async def create(self, request: web.Request) -> Response:
        services = self._services
        services.manager.check_open()
        fields: Fields = await services.read(request, Fields)
        prompt = fields.pop("prompt", NULL)
        wish = await self._wishes.of(fields)
        body = wish.body
        name = wish.rid or new_id("cmpl-")
        prompts, echoed = await self._prompts(prompt, wish, name, services.owner(request))
        if body.stream and body.echo:
            check_streamed(prompts, services.limits, cumulative=False)
        around = Envelope(name, KIND, KIND, services.model_name, body.stream_options, bool(body.return_timeline))
        form = CompletionFormat(services, body, echoed, around)
        return await services.respond(request, prompts, form, bool(body.stream))

    def _wish(self, said: bytes) -> Wish:
        body = decode(said, CompletionRequest)
        check_request(body, self._services)
        rid = check_rid(body.rid or body.request_id)
        return Wish(body, rid, self._sampling(body), form_of(body), check_priority(body.priority))

    async def _prompts(
        self, prompt: msgspec.Raw, wish: Wish, name: str, owner: bytes
    ) -> tuple[list[Prompt], Mapping[str, str]]:
        """What to send, and the texts that are to be echoed, by the prompts' names."""
        words, body, spec, priority = self._services.words, wish.body, wish.spec, wish.priority
        if prompt == NULL:
            raise RequestError("`prompt` is missing.", param="prompt")
        grammar = await self._services.constraints.grammar(wish.form)
        texts, ids, _ = prompt_texts_or_ids(prompt, "prompt", words.vocab_size)
        if texts:
            ids = await words.encode(texts, add_special_tokens=body.add_special_tokens is not False)
        if not ids:
            raise RequestError("`prompt` must not be empty.", param="prompt")
        space, is_named = namespace(body.cache_salt, body.extra_key, owner), wish.rid is not None
        if len(ids) == 1:
            prompts = [Prompt(name, ids[0], spec, space, priority, grammar=grammar, is_named=is_named)]
        else:
            prompts = [
                Prompt(f"{name}_{i}", prompt, spec, space, priority, name, grammar, is_named)
                for i, prompt in enumerate(ids)
            ]
        if not body.echo:
            return prompts, {}
        texts = texts or await words.decode(ids, body.skip_special_tokens is not False)
        return prompts, dict(zip((prompt.name for prompt in prompts), texts, strict=True))

    def _sampling(self, body: CompletionRequest) -> SamplingSpec:
        logprobs, prompt_logprobs = -1, check_prompt_logprobs(body)
        if body.logprobs is not None:
            logprobs = sampling.check_top_logprobs(body.logprobs, "logprobs", sampling.MAX_TOP_LOGPROBS)
        if body.echo and logprobs >= 0:
            prompt_logprobs = max(logprobs, prompt_logprobs)
        spec = sampling.from_openai(
            body,
            vocab_size=self._services.words.vocab_size,
            max_tokens=(body.max_tokens, "max_tokens"),
            default_max_new_tokens=DEFAULT_MAX_TOKENS,
            logprobs=LogprobWish(logprobs, prompt_logprobs),
            defaults=self._services.sampling_defaults,
            may_be_empty=bool(body.echo),
        )
        if body.best_of in (None, spec.n):
            return spec
        if not spec.n < body.best_of <= sampling.MAX_N:
            raise RequestError(f"`best_of` must be between `n` and {sampling.MAX_N}.", param="best_of")
        if body.stream:
            raise RequestError("Which choices are best is known at the end only; set `stream`: false.", param="best_of")
        rated = {**spec.fields, "logprobs": max(logprobs, 0)}
        return dataclasses.replace(spec, n=body.best_of, fields=rated)


class CompletionFormat(msgspec.Struct, eq=False, dict=True):
    services: Services
    asked: CompletionRequest
    echoed: Mapping[str, str]  # prompts by their names
    envelope: Envelope
    offsets: dict[Generation, int] = {}  # characters of the tokens that were shown; of those that have begun

    @cached_property
    def _head(self) -> bytes:
        return self.envelope.head + b'{"index":'

    @cached_property
    def _plain_rest(self) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null,"matched_stop":null,"stop_reason":null}'
        return rest + self.envelope.rest

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> Completion:
        choices = []
        for index, (generation, answer) in enumerate(self._best(generations, answers)):
            choice = self._choice(generation, answer, index)
            if self.asked.prompt_logprobs is not None:
                ids = unpack_ids(generation.prompt.ids)
                choice.prompt_logprobs = self.services.texts.prompt_by_id(answer.prompt_logprobs or NO_LOGPROBS, ids)
            self.envelope.add_timeline(choice, generation)
            choices.append(choice)
        return self.envelope.answer(choices, generations)

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        if delta.finish is None and delta.logprobs is None and not self.envelope.continuous_usage and not self.echoed:
            if not delta.text:
                return b""
            text = msgspec.json.encode(delta.text)
            return b'%b%d,"text":%b%b' % (self._head, generation.index, text, self._plain_rest)
        return self.envelope.event(self._choice(generation, delta, generation.index), generation)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return self.envelope.tail(generations) + DONE

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def _best(
        self, generations: Sequence[Generation], answers: Sequence[TextDelta]
    ) -> list[tuple[Generation, TextDelta]]:
        """Of each prompt's choices the likeliest per token, if more were made than are wanted."""
        if len(generations) == 1:
            return [(generations[0], answers[0])]
        pairs = zip(generations, answers, strict=True)
        wanted = self.asked.n or 1  # of each prompt
        best: list[tuple[Generation, TextDelta]] = []
        for _, of_prompt in itertools.groupby(pairs, key=lambda pair: pair[0].prompt.name):
            choices = list(of_prompt)
            if len(choices) > wanted:
                choices.sort(key=lambda pair: -_mean_logprob(pair[1]))
            best += choices[:wanted]
        return best

    def _choice(self, generation: Generation, delta: TextDelta, index: int) -> Choice:
        """Text and logprobs stand behind those of the prompt if this is the first of a choice and they are echoed."""
        text, logprobs = delta.text, None
        begins = generation not in self.offsets
        offset = self.offsets.setdefault(generation, 0)
        if begins and self.echoed:
            text = self.echoed[generation.prompt.name] + text
        if self.asked.logprobs is not None:
            parts = []
            if begins and self.echoed:
                ids = unpack_ids(generation.prompt.ids)
                parts.append(self.services.texts.completion_prompt(delta.prompt_logprobs or NO_LOGPROBS, ids))
                offset = sum(map(len, parts[0]["tokens"]))
            behind = self.services.texts.completion(delta.logprobs or NO_LOGPROBS, unpack_ids(delta.ids), offset)
            self.offsets[generation] = offset + sum(map(len, behind["tokens"]))
            parts.append(behind)
            logprobs = {name: [value for part in parts for value in part[name]] for name in behind}
        choice = Choice(index, text, logprobs=logprobs, matched_stop=None, stop_reason=None)
        if delta.finish is not None:
            choice.end(delta.finish, self.services.model.eos_token_ids)
        return choice


def _mean_logprob(answer: TextDelta) -> float:
    chosen = answer.logprobs.chosen if answer.logprobs else ()
    return sum(chosen) / len(chosen) if chosen else -math.inf
