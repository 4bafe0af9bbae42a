"""L1, main process: what the OpenAI routes have in common: checks, usage, and how an end is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Generation
from srt.frontend.protocol import OpenAIRequest, check_supported
from srt.frontend.services import Services
from srt.messages import Finish


def check_request(request: OpenAIRequest, services: Services) -> None:
    services.check_model(request.model)
    check_supported(request)
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise unsupported("response_format", "only the type `text` is available on this server")
    if request.stream_options is not None and not request.stream:
        raise RequestError("`stream_options` goes with `stream`: true.", param="stream_options")


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Each prompt counts once, and as much of it as its first choice found in the cache."""
    prompts = {generation.prompt.name: generation for generation in reversed(generations)}.values()
    prompt_tokens = sum(first.prompt.num_tokens for first in prompts)
    completion_tokens = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in prompts)},
        "reasoning_tokens": 0,
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
