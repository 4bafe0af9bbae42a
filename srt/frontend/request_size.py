"""L1, frontend: how much one HTTP request may ask for, all its prompts and choices together.

Each choice is a request of its own to the engine, with a copy of all that it needs, so what is short in a body can be
long here; and each log-probability is an object until it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from srt.frontend.errors import RequestError
from srt.frontend.generation import MAX_RATINGS, Prompt, too_many_ratings
from srt.frontend.sampling import MAX_PROMPT_RATINGS
from srt.limits import Limits

MAX_GENERATIONS = 4096
MAX_COPIED_BYTES = 2**25  # of grammars, stop strings and lists of tokens: the longest grammar 128 times
MAX_PROMPT_TOKENS = 2**26  # 256 MB
MAX_EVENT_RATINGS = 2**18  # one event's, about 8 MB


def check_size(prompts: Sequence[Prompt], total: int) -> None:
    """RequestError if `total` choices of these prompts are too much for one request; a single one never is."""
    if total > MAX_GENERATIONS:
        raise RequestError(f"One request takes at most {MAX_GENERATIONS} choices, not {total}.", param="n")
    copied = sum(prompt.spec.n * _copied(prompt) for prompt in prompts)
    if copied > MAX_COPIED_BYTES:
        raise RequestError(
            f"The constraints, stop strings, biases and token ids of {total} choices together are {copied} bytes, more "
            f"than {MAX_COPIED_BYTES}; make them shorter, or ask for fewer choices in one request.",
            param="n",
        )
    tokens = sum(prompt.spec.n * prompt.num_tokens for prompt in prompts)
    if tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"The prompts of {total} choices together are {tokens} tokens, more than {MAX_PROMPT_TOKENS}; "
            "ask for fewer choices in one request.",
            param="n",
        )
    ratings = sum(prompt.spec.n * prompt.spec.prompt_ratings(prompt.num_tokens) for prompt in prompts)
    if ratings > MAX_PROMPT_RATINGS:
        raise RequestError(
            f"Log-probabilities of the prompts of {total} choices, alternatives included, are {ratings}, more than "
            f"{MAX_PROMPT_RATINGS}; ask for fewer alternatives, prompts or choices in one request."
        )


def _copied(prompt: Prompt) -> int:
    grammar = prompt.grammar
    return prompt.spec.size if grammar is None else prompt.spec.size + len(grammar.text)


def check_streamed(prompts: Sequence[Prompt], limits: Limits, *, cumulative: bool) -> None:
    """RequestError if an event would have too many log-probabilities: those of its prompt, and if events are cumulative
    also all of its output."""
    kept = 0
    for prompt in prompts:
        spec = prompt.spec
        ratings = spec.prompt_ratings(prompt.num_tokens)
        if cumulative and spec.logprobs >= 0:
            length = spec.default_max_new_tokens if spec.max_new_tokens is None else spec.max_new_tokens
            ratings += spec.ratings_each * min(length, limits.max_new_tokens(prompt.num_tokens))
            kept += spec.n * ratings
        if ratings > MAX_EVENT_RATINGS:
            raise too_many_ratings("An event of this stream", MAX_EVENT_RATINGS, "`stream`: false")
    if kept > MAX_RATINGS:
        raise too_many_ratings("This stream", MAX_RATINGS, "`stream`: false")
