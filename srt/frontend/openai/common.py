"""L1, frontend: what the OpenAI routes have in common: checks, what stands around choices, usage, ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.protocol import OpenAIRequest, StreamOptions, check_supported
from srt.frontend.sampling import MAX_TOP_LOGPROBS, check_top_logprobs
from srt.frontend.services import Services
from srt.messages import Finish


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


class Envelope:
    """What stands around the choices of every answer and every chunk of one request."""

    def __init__(
        self,
        name: str,
        answer_object: str,
        chunk_object: str,
        model_name: str,
        options: StreamOptions | None,
        timeline: bool,
    ) -> None:
        self._timeline = timeline
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self._include_usage = bool(options and options.include_usage)
        self._answer_base = {"id": name, "object": answer_object, "created": int(time.time()), "model": model_name}
        self._chunk_object = chunk_object

    # A chunk without usage is its head, the choice as JSON, and its rest: there is no quicker way to write one.

    @cached_property
    def head(self) -> bytes:
        return self._encoded + b',"choices":['

    @property
    def rest(self) -> bytes:
        return b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    @cached_property
    def _chunk_base(self) -> dict[str, Any]:
        return {**self._answer_base, "object": self._chunk_object}

    @cached_property
    def _encoded(self) -> bytes:
        return b"data: " + msgspec.json.encode(self._chunk_base)[:-1]

    def ended(self, choice: dict[str, Any], generation: Generation) -> dict[str, Any]:
        """The choice, with its timeline if that is wanted."""
        if self._timeline:
            choice["timeline"] = generation.timeline.stretches()
        return choice

    def answer(self, choices: list[dict[str, Any]], generations: Sequence[Generation]) -> dict[str, Any]:
        """`generations` are all that were made, for a choice or to choose from."""
        return {**self._answer_base, "choices": choices, "usage": usage(generations)}

    def event(self, choice: dict[str, Any], generation: Generation) -> bytes:
        if choice["finish_reason"] is not None:
            choice = self.ended(choice, generation)
        chunk = {**self._chunk_base, "choices": [choice]}
        if self.continuous_usage:
            chunk["usage"] = usage([generation])
        elif self._include_usage:
            chunk["usage"] = None
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def tail(self, generations: Sequence[Generation]) -> bytes:
        if not self._include_usage:
            return b""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._encoded, msgspec.json.encode(usage(generations)))


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
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
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "reasoning_tokens": reasoning_tokens,
    }


def finish_fields(finish: Finish | None, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """SGLang tells which stop matched as `matched_stop`, vLLM as `stop_reason`, where null stands for EOS."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None, "stop_reason": None}
    matched = finish.matched.decode("utf-8", "replace") if isinstance(finish.matched, bytes) else finish.matched
    return {
        "finish_reason": finish.reason,
        "matched_stop": matched,
        "stop_reason": None if matched in eos_token_ids else matched,
    }
