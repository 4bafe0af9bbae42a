"""L1, frontend: /generate, SGLang's own route. Streamed text and ids are cumulative, or only what is new."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from srt.frontend import sampling
from srt.frontend.answers import Response
from srt.frontend.constraints import form_of
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation, Prompt
from srt.frontend.logprobs import NO_LOGPROBS, TokenTexts
from srt.frontend.protocol import NULL, GenerateRequest, NativeSampling, check_supported
from srt.frontend.request_size import check_streamed
from srt.frontend.sampling import LogprobWish
from srt.frontend.services import Services, check_priority, check_rid, new_id
from srt.frontend.streaming import DONE, error_event
from srt.frontend.words import check_number, namespace, prompt_texts_or_ids
from srt.messages import Finish, Grammar, TextDelta, unpack_ids

T = TypeVar("T")

KINDS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
OUTPUT_LISTS = [f"output_{kind}" for kind in KINDS]
INPUT_LISTS = [f"input_{kind}" for kind in KINDS]
PROMPT_FIELDS = ("prompt_logprobs_start", "logprob_ids")


class Native:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def generate(self, request: web.Request) -> Response:
        services = self._services
        services.manager.check_open()
        body: GenerateRequest = await services.read(request, GenerateRequest)
        prompts, form = await self.accept(body, services.owner(request))
        return await services.respond(request, prompts, form, bool(body.stream))

    async def accept(self, body: GenerateRequest, owner: bytes = b"") -> tuple[list[Prompt], GenerateFormat]:
        """What to send to the engine, and how to write its answer. RequestError for what cannot be served."""
        check_supported(body)
        prompts, as_list = await self._prompts(body, owner)
        with_text, with_prompt = bool(body.return_text_in_logprobs), bool(body.return_prompt_token_ids)
        incremental = self._services.config.incremental_streaming_output
        if body.stream:
            check_streamed(prompts, self._services.limits, cumulative=not incremental)
        texts, version = self._services.texts, self._services.weights.version
        return prompts, GenerateFormat(texts, as_list, with_text, with_prompt, incremental, version)

    async def _prompts(self, body: GenerateRequest, owner: bytes) -> tuple[list[Prompt], bool]:
        """The prompts, and whether the answer is a list."""
        words = self._services.words
        if (body.text is None) == (body.input_ids == NULL):
            raise RequestError("Give one of `text` and `input_ids`.", param="text")
        if body.text is None:
            _, ids, as_list = prompt_texts_or_ids(body.input_ids, "input_ids", words.vocab_size)
            if not ids:
                raise RequestError("`input_ids` takes token ids; give words as `text`.", param="input_ids")
        else:
            texts, as_list = ([body.text], False) if isinstance(body.text, str) else (body.text, True)
            if not texts:
                raise RequestError("`text` must not be empty.", param="text")
            check_number(len(texts), "text")
            ids = await words.encode(texts)
        count = len(ids)
        samplings = _per_prompt(body.sampling_params or NativeSampling(), count, "sampling_params")
        wanted = _per_prompt(
            bool(body.return_logprob) if not isinstance(body.return_logprob, list) else body.return_logprob,
            count,
            "return_logprob",
        )
        tops = _per_prompt(body.top_logprobs_num, count, "top_logprobs_num")
        starts = _per_prompt(body.logprob_start_len, count, "logprob_start_len")
        asked = _asked_ids(body.token_ids_logprob, count, words.vocab_size)
        salts = _per_prompt(body.cache_salt, count, "cache_salt")
        extras = _per_prompt(body.extra_key, count, "extra_key")
        names, batch = self._names(body.rid, count)
        priority = check_priority(body.priority)
        specs: dict[tuple[int, LogprobWish], sampling.SamplingSpec] = {}  # what many prompts share is checked once
        grammars: dict[int, Grammar | None] = {}
        prompts = []
        for i in range(count):
            wish = _logprob_wish(tops[i], starts[i], asked[i])
            if not wanted[i]:
                wish = sampling.NO_LOGPROBS_WANTED
            key = id(samplings[i]), wish
            if key not in specs:
                specs[key] = sampling.from_native(samplings[i], vocab_size=words.vocab_size, logprobs=wish)
            if key[0] not in grammars:
                grammars[key[0]] = await self._services.constraints.grammar(form_of(samplings[i]))
            space = namespace(salts[i], extras[i], owner)
            prompts.append(
                Prompt(names[i], ids[i], specs[key], space, priority, batch, grammars[key[0]], bool(body.rid))
            )
        return prompts, as_list or len(prompts) > 1 or prompts[0].spec.n > 1

    @staticmethod
    def _names(rid: str | list[str] | None, count: int) -> tuple[list[str], str | None]:
        """The prompts' names, and the one for all of them, if so many have one: then a number tells them apart."""
        if isinstance(rid, list):
            return [check_rid(one) or new_id("") for one in _per_prompt(rid, count, "rid")], None
        name = check_rid(rid) or new_id("")
        return ([name], None) if count == 1 else ([f"{name}_{i}" for i in range(count)], name)


def _per_prompt(value: T | list[T], count: int, param: str) -> list[T]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"`{param}` has {len(value)} entries for {count} prompts.", param=param)
    return value


def _asked_ids(asked: list[int | list[int] | None] | None, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """One list for all prompts, or one for each."""
    param = "token_ids_logprob"
    lists: Any = [asked or []] * count
    if any(not isinstance(each, int) for each in asked or ()):
        lists = _per_prompt(asked, count, param)
        if any(isinstance(each, int) for each in lists):
            raise RequestError(f"`{param}` takes token ids, or lists of token ids.", param=param)
    return [sampling.check_ids(each, param, sampling.MAX_LOGPROB_IDS, vocab_size) for each in lists]


def _logprob_wish(top: int | None, start: int | None, ids: tuple[int, ...]) -> LogprobWish:
    num_top = sampling.check_top_logprobs(top, "top_logprobs_num", sampling.MAX_NATIVE_TOP_LOGPROBS)
    if start is None or start == -1:
        return LogprobWish(num_top, ids=ids)
    if start < 0:
        raise RequestError("`logprob_start_len` must be a position in the prompt, or -1.", param="logprob_start_len")
    return LogprobWish(num_top, num_top, start, ids)


class GenerateFormat:
    """Writes /generate's bodies and events. What is cumulative is kept as the JSON it will be sent as."""

    def __init__(
        self,
        texts: TokenTexts,
        indexed: bool,
        with_text: bool,
        with_prompt: bool,
        incremental: bool,
        weight_version: str,
    ) -> None:
        self._texts = texts
        self._indexed = indexed
        self._with_text = with_text
        self._with_prompt = with_prompt
        self._incremental = incremental
        self._weight_version = weight_version
        self._so_far: dict[Generation, _SoFar] = {}

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> Any:
        bodies = [self._body(one, answer) for one, answer in zip(generations, answers, strict=True)]
        return bodies if self._indexed else bodies[0]

    def _body(self, generation: Generation, answer: TextDelta) -> dict[str, Any]:
        ids = unpack_ids(answer.ids)
        meta = self._meta(generation)
        if generation.logprobs >= 0:
            asked = generation.prompt.spec.fields["logprob_ids"]
            lists = self._texts.native(answer.logprobs or NO_LOGPROBS, ids, asked, self._with_text)
            meta |= zip(OUTPUT_LISTS, lists, strict=True)
            meta["output_token_logprobs_length"] = len(lists[0])
            meta |= zip(INPUT_LISTS, self._prompt_lists(generation, answer), strict=True)
        body = {"text": answer.text, "output_ids": ids.tolist(), "meta_info": meta}
        if self._with_prompt:
            body["prompt_token_ids"] = unpack_ids(generation.prompt.ids).tolist()
        return body

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        so_far = self._so_far.get(generation)
        if so_far is None:
            so_far = self._so_far[generation] = _SoFar(msgspec.json.encode(self._constant_meta(generation))[:-1])
            if generation.logprobs >= 0:
                so_far.prompt = b"".join(
                    b',"%b":%b' % (name.encode(), msgspec.json.encode(values))
                    for name, values in zip(INPUT_LISTS, self._prompt_lists(generation, delta), strict=True)
                )
        so_far.text += msgspec.json.encode(delta.text)[1:-1]
        ids = unpack_ids(delta.ids)
        so_far.extend(so_far.ids, ids.tolist())
        so_far.tokens += len(ids)
        if delta.finish is None:
            meta = b'%b,"completion_tokens":%d,"finish_reason":null' % (so_far.meta, so_far.tokens)
        else:
            meta = msgspec.json.encode(self._meta(generation))[:-1]
        head = b'data: {"index":%d,"text":"' % generation.index if self._indexed else b'data: {"text":"'
        parts = [head, so_far.text, b'","output_ids":[', so_far.ids, b'],"meta_info":', meta]
        if delta.logprobs is not None:
            asked = generation.prompt.spec.fields["logprob_ids"]
            lists = self._texts.native(delta.logprobs, ids, asked, self._with_text)
            for items, more in zip(so_far.logprobs, lists, strict=True):
                so_far.extend(items, more)
        if generation.logprobs >= 0:
            for name, items in zip(OUTPUT_LISTS, so_far.logprobs, strict=True):
                parts += (b',"%b":[' % name.encode(), items, b"]")
            parts += (b',"output_token_logprobs_length":%d' % so_far.tokens, so_far.prompt)
        parts.append(b"}")
        if self._with_prompt:
            parts += (b',"prompt_token_ids":', msgspec.json.encode(unpack_ids(generation.prompt.ids).tolist()))
        parts.append(b"}\n\n")
        event = b"".join(parts)
        if self._incremental:
            so_far.clear()
        return event

    def tail(self, generations: Sequence[Generation]) -> bytes:
        return DONE

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def _prompt_lists(self, generation: Generation, first: TextDelta) -> tuple[list, list, list]:
        spec = generation.prompt.spec
        if spec.prompt_logprobs < 0:
            return [], [], []
        ids, start, asked = unpack_ids(generation.prompt.ids), *map(spec.fields.get, PROMPT_FIELDS)
        return self._texts.native_prompt(first.prompt_logprobs or NO_LOGPROBS, ids, start, asked, self._with_text)

    def _constant_meta(self, generation: Generation) -> dict[str, Any]:
        """What is known with the first token and stays."""
        restored = generation.restored_tokens
        details = {"device": generation.cached_tokens - restored, "host": restored}
        return {
            "id": generation.name,
            "prompt_tokens": generation.prompt.num_tokens,
            "cached_tokens": generation.cached_tokens,
            **({"cached_tokens_details": details} if restored else {}),
            "reasoning_tokens": 0,
            "weight_version": self._weight_version,
            "dp_rank": generation.assignment.engine,
        }

    def _meta(self, generation: Generation) -> dict[str, Any]:
        """Of a generation that has finished."""
        finish, timeline = generation.finish, generation.timeline
        return {
            **self._constant_meta(generation),
            "completion_tokens": generation.completion_tokens,
            "finish_reason": finish_reason(finish, generation.completion_tokens),
            "num_retractions": finish.num_retractions,
            "e2e_latency": timeline.taken - timeline.received,
            "response_sent_to_client_ts": time.time(),
            "timeline": msgspec.structs.asdict(timeline.stretches()),
        }


class _SoFar:
    """JSON of one generation's output up to now, without the outer brackets."""

    __slots__ = ("ids", "logprobs", "meta", "prompt", "text", "tokens")

    def __init__(self, meta: bytes) -> None:
        self.meta = meta
        self.text, self.ids = bytearray(), bytearray()
        self.logprobs = [bytearray() for _ in OUTPUT_LISTS]
        self.prompt = b""  # whole entries
        self.tokens = 0

    def clear(self) -> None:
        for items in (self.text, self.ids, *self.logprobs):
            items.clear()
        self.prompt = b""

    @staticmethod
    def extend(items: bytearray, more: list[Any]) -> None:
        if more:
            items += b"," if items else b""
            items += msgspec.json.encode(more)[1:-1]


def finish_reason(finish: Finish, completion_tokens: int) -> dict[str, Any]:
    if finish.reason == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.reason == "abort":
        return {
            "type": "abort", "message": finish.message, "status_code": finish.status or None, "err_type": None
        }  # fmt: skip
    matched = finish.matched
    return {"type": "stop", "matched": matched.decode("utf-8", "replace") if isinstance(matched, bytes) else matched}
