"""L1, frontend: what the OpenAI routes have in common: checks, what stands around choices, usage, ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.protocol import OpenAIRequest, StreamOptions, check_supported
from srt.frontend.sampling import MAX_TOP_LOGPROBS, check_top_logprobs
from srt.frontend.services import Services
from srt.messages import Finish
from srt.observe.timeline import Stretches


def check_request(request: OpenAIRequest, services: Services) -> None:
    services.check_model(request.model)
    check_supported(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("`stream_options` goes with `stream`: true.", param="stream_options")


def check_prompt_logprobs(request: OpenAIRequest) -> int:
    """How many alternatives are wanted, or -1."""
    if request.prompt_logprobs is None:
        return -1
    if request.stream:
        raise RequestError("`prompt_logprobs` are not streamed; set `stream`: false.", param="prompt_logprobs")
    return check_top_logprobs(request.prompt_logprobs, "prompt_logprobs", MAX_TOP_LOGPROBS)


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    reasoning_tokens: int

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> Usage:
        """Each prompt counts once, and as much of it as its first choice found in the cache."""
        prompt_tokens = cached_tokens = completion_tokens = reasoning_tokens = 0
        prompt = None
        for generation in generations:
            if generation.prompt is not prompt:  # whose choices stand together
                prompt = generation.prompt
                prompt_tokens += prompt.num_tokens
                cached_tokens += generation.cached_tokens
            completion_tokens += generation.completion_tokens
            reasoning_tokens += generation.reasoning_tokens
        total, details = prompt_tokens + completion_tokens, {"cached_tokens": cached_tokens}
        return cls(prompt_tokens, completion_tokens, total, details, reasoning_tokens)


class Choice(msgspec.Struct):
    """Of an answer or a chunk. One of `text`, `message` and `delta` is set."""

    index: int
    text: str | UnsetType = UNSET
    message: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None | UnsetType = UNSET
    stop_reason: int | str | None | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    timeline: Stretches | UnsetType = UNSET

    def end(self, finish: Finish, eos_token_ids: Sequence[int]) -> None:
        """SGLang tells which stop matched as `matched_stop`, vLLM as `stop_reason`, where null stands for EOS."""
        matched = finish.matched.decode("utf-8", "replace") if isinstance(finish.matched, bytes) else finish.matched
        self.finish_reason, self.matched_stop = finish.reason, matched
        self.stop_reason = None if matched in eos_token_ids else matched


class Completion(msgspec.Struct):
    """An answer or a chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice] | UnsetType = UNSET
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: Any = UNSET


class Envelope(msgspec.Struct, eq=False, dict=True):
    """What stands around the choices of every answer and every chunk of one request."""

    name: str
    answer_object: str
    chunk_object: str
    model_name: str
    options: StreamOptions | None
    timeline: bool
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    @cached_property
    def continuous_usage(self) -> bool:
        return bool(self.options and self.options.continuous_usage_stats)

    @cached_property
    def _include_usage(self) -> bool:
        return bool(self.options and self.options.include_usage)

    # A chunk without usage is its head, the choice as JSON, and its rest: there is no quicker way to write one.

    @cached_property
    def head(self) -> bytes:
        return self._encoded + b',"choices":['

    @property
    def rest(self) -> bytes:
        return b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    @cached_property
    def _encoded(self) -> bytes:
        return b"data: " + msgspec.json.encode(self._around(self.chunk_object))[:-1]

    def _around(self, kind: str) -> Completion:
        return Completion(self.name, kind, self.created, self.model_name)

    def answer(self, choices: Sequence[Choice], generations: Sequence[Generation]) -> Completion:
        """`generations` are all that were made, for a choice or to choose from."""
        answer = self._around(self.answer_object)
        answer.choices, answer.usage = choices, Usage.of(generations)
        return answer

    def add_timeline(self, choice: Choice, generation: Generation) -> None:
        """If it is wanted."""
        if self.timeline:
            choice.timeline = generation.timeline.stretches()

    def event(self, choice: Choice, generation: Generation) -> bytes:
        if choice.finish_reason is not None:
            self.add_timeline(choice, generation)
        chunk = self._around(self.chunk_object)
        chunk.choices = (choice,)
        if self.continuous_usage:
            chunk.usage = Usage.of([generation])
        elif self._include_usage:
            chunk.usage = None
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        if not self._include_usage:
            return b""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._encoded, msgspec.json.encode(Usage.of(generations)))
