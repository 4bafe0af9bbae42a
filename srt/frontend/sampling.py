"""L1, frontend: from what a client asks to `SamplingParams`. Every number is checked here and nowhere else."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from srt.frontend.errors import RequestError
from srt.frontend.protocol import NativeSampling, OpenAIRequest, SamplingFields, check_supported
from srt.limits import Limits
from srt.messages import SamplingParams

MAX_N = 128
MAX_STOPS = 32
MAX_STOP_BYTES = 4096
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_NATIVE_TOP_LOGPROBS = 128
MAX_LOGPROB_IDS = 256
MAX_PROMPT_RATINGS = 2**21  # log-probabilities of prompts in one HTTP request, alternatives included
BYTES_PER_ENTRY = 64  # of lists of tokens, as Python keeps them
NATIVE_MAX_NEW_TOKENS = 128  # of a /generate request that does not say
GREEDY_BELOW = 1e-6

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, 0 <= result < 2**63: SplitMix64's finalizer (Steele et al. 2014)."""
    if index == 0:  # one choice and the first of many say the same
        return seed % 2**63
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def seeds(random_seed: int | None, counts: Iterable[int]) -> Iterator[int]:
    """Seeds for requests that bring none: always the same ones if the server was given a seed, one for each count."""
    if random_seed is None:
        while True:
            yield random.getrandbits(63)
    for count in counts:
        yield mix_seed(random_seed, count)


class LogprobWish(NamedTuple):
    """Numbers are of alternatives beside each token; -1 wants none at all."""

    output: int = -1
    prompt: int = -1
    prompt_start: int = 0  # position of the first token of the prompt that is rated
    ids: tuple[int, ...] = ()  # rated at each of these positions


NO_LOGPROBS_WANTED = LogprobWish()


class SamplingDefaults(NamedTuple):
    """What a request means that does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, generation_config: dict[str, Any]) -> SamplingDefaults:
        """RequestError for a generation_config.json whose values no request could have."""
        given = {name: generation_config.get(name) for name in cls._fields}
        request = msgspec.convert({k: v for k, v in given.items() if v is not None}, NativeSampling, strict=False)
        if request.top_k == 0:  # transformers' way to keep all
            request.top_k = -1
        own = _filters(request, OPENAI_DEFAULTS)
        return cls(**own)


OPENAI_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True)
class SamplingSpec:
    """A checked request for `n` choices; `params` completes it for a prompt of known length."""

    n: int
    seed: int | None
    max_new_tokens: int | None  # None: the client left it to us
    default_max_new_tokens: int | None  # None: all that the context has left
    min_new_tokens: int
    fields: dict[str, Any]  # the other fields of SamplingParams

    @functools.cached_property
    def logprobs(self) -> int:
        return self.fields["logprobs"]

    @functools.cached_property
    def prompt_logprobs(self) -> int:
        return self.fields["prompt_logprobs"]

    @functools.cached_property
    def size(self) -> int:
        """About how many bytes each choice has a copy of."""
        lists = sum(len(self.fields[name]) for name in ("logit_bias", "stop_token_ids", "logprob_ids"))
        return sum(map(len, self.fields["stop"])) + BYTES_PER_ENTRY * lists

    @property
    def ratings_each(self) -> int:
        """Log-probabilities at each token of an output that is rated."""
        return 1 + self.logprobs + len(self.fields["logprob_ids"])

    def prompt_ratings(self, prompt_tokens: int) -> int:
        """Log-probabilities of a prompt of this length."""
        if self.prompt_logprobs < 0:
            return 0
        return max(0, prompt_tokens - self.fields["prompt_logprobs_start"]) * self._prompt_ratings_each

    @property
    def _prompt_ratings_each(self) -> int:
        return 1 + self.prompt_logprobs + len(self.fields["logprob_ids"])

    def resolve_max_new_tokens(self, prompt_tokens: int, limits: Limits) -> int:
        """RequestError if prompt and output can never fit."""
        if self.prompt_logprobs >= 0:
            self._check_prompt_logprobs(prompt_tokens)
        room = limits.max_new_tokens(prompt_tokens)
        wanted = self.max_new_tokens
        if wanted is None:
            wanted = max(1, room if self.default_max_new_tokens is None else min(room, self.default_max_new_tokens))
        drawn = wanted or 1  # the draw behind the prompt is made, then dropped
        if drawn > room:
            raise RequestError(limits.refusal(prompt_tokens, drawn), code="context_length_exceeded")
        return wanted

    def _check_prompt_logprobs(self, prompt_tokens: int) -> None:
        start = self.fields["prompt_logprobs_start"]
        if start > prompt_tokens:
            raise _fault("logprob_start_len", f"must not exceed the prompt's {prompt_tokens} tokens")
        if self.prompt_ratings(prompt_tokens) > MAX_PROMPT_RATINGS:
            each = self._prompt_ratings_each
            raise RequestError(
                f"Log-probabilities of {prompt_tokens - start} tokens of the prompt, {each} each, are more than "
                f"{MAX_PROMPT_RATINGS}; ask for fewer alternatives, or for those of a shorter part."
            )

    def params(self, max_new_tokens: int, seed: int, choice: int) -> SamplingParams:
        return msgspec.structs.replace(
            self._params,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(self.min_new_tokens, max_new_tokens),
            seed=mix_seed(seed, choice),
        )

    @functools.cached_property
    def _params(self) -> SamplingParams:
        """What those of all requests are made of, in a third of the time that it takes to make them anew."""
        return SamplingParams(max_new_tokens=0, **self.fields)


def from_native(
    request: NativeSampling, *, vocab_size: int, logprobs: LogprobWish = NO_LOGPROBS_WANTED
) -> SamplingSpec:
    check_supported(request)
    return _spec(
        request,
        vocab_size,
        max_new_tokens=(request.max_new_tokens, "max_new_tokens"),
        min_new_tokens=(request.min_new_tokens, "min_new_tokens"),
        seed=(request.sampling_seed, "sampling_seed"),
        default=NATIVE_MAX_NEW_TOKENS,
        logprobs=logprobs,
        may_be_empty=True,  # what is computed then is cached
        keep_stop=bool(request.no_stop_trim),
    )


def from_openai(
    request: OpenAIRequest,
    *,
    vocab_size: int,
    max_tokens: tuple[int | None, str],
    default_max_new_tokens: int | None,
    logprobs: LogprobWish,
    may_be_empty: bool = False,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> SamplingSpec:
    """`max_tokens` is the number and the name under which it came; 0 where the answer `may_be_empty`."""
    return _spec(
        request,
        vocab_size,
        max_new_tokens=max_tokens,
        min_new_tokens=(request.min_tokens, "min_tokens"),
        seed=(request.seed, "seed"),
        default=default_max_new_tokens,
        logprobs=logprobs,
        may_be_empty=may_be_empty or logprobs.prompt >= 0,
        keep_stop=bool(request.no_stop_trim or request.include_stop_str_in_output),
        defaults=defaults,
    )


class _Plain(NamedTuple):
    """What most requests say of sampling, as it came; the rest of `SamplingFields` is absent."""

    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    logit_bias: None = None
    stop: None = None
    stop_token_ids: None = None


_plain = attrgetter(*_Plain._fields[:-3])


def _spec(request: SamplingFields, vocab_size: int, **rest: Any) -> SamplingSpec:
    """Many requests are equal in this, and checking takes longer than finding what came of it before."""
    if request.logit_bias is None and request.stop is None and request.stop_token_ids is None:
        return _plain_spec(_plain(request), vocab_size, **rest)
    return _checked_spec(request, vocab_size, **rest)


@functools.lru_cache(1024)
def _plain_spec(values: tuple, vocab_size: int, **rest: Any) -> SamplingSpec:
    return _checked_spec(_Plain(*values), vocab_size, **rest)


def _checked_spec(
    request: SamplingFields | _Plain,
    vocab_size: int,
    *,
    max_new_tokens: tuple[int | None, str],
    min_new_tokens: tuple[int | None, str],
    seed: tuple[int | None, str],
    default: int | None,
    logprobs: LogprobWish,
    may_be_empty: bool,
    keep_stop: bool,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> SamplingSpec:
    longest = _integer(*max_new_tokens, default=None, least=0 if may_be_empty else 1, most=2**31 - 1)
    shortest = _integer(*min_new_tokens, default=0, least=0, most=2**31 - 1)
    bound = default if longest is None else longest
    if bound is not None and shortest > bound:
        raise _fault(min_new_tokens[1], f"must not exceed `{max_new_tokens[1]}` ({bound})")
    filters = _filters(request, defaults)
    if filters["top_p"] == 0.0:  # the smallest set of tokens with any probability
        filters |= {"top_p": 1.0, "top_k": 1}
    if filters["temperature"] < GREEDY_BELOW:
        filters["temperature"] = 0.0
    if not 0 < filters["top_k"] < vocab_size:
        filters["top_k"] = 0
    fields = {
        **filters,
        "presence_penalty": _number(request.presence_penalty, "presence_penalty", default=0.0, least=-2.0, most=2.0),
        "frequency_penalty": _number(request.frequency_penalty, "frequency_penalty", default=0.0, least=-2.0, most=2.0),
        "logit_bias": _logit_bias(request.logit_bias, vocab_size),
        "stop": _stop(request.stop),
        "stop_token_ids": check_ids(request.stop_token_ids, "stop_token_ids", MAX_STOP_TOKENS, vocab_size),
        "ignore_eos": bool(request.ignore_eos),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "no_stop_trim": keep_stop,
        "logprobs": logprobs.output,
        "prompt_logprobs": logprobs.prompt,
        "prompt_logprobs_start": logprobs.prompt_start,
        "logprob_ids": logprobs.ids,
    }
    return SamplingSpec(
        n=_integer(request.n, "n", default=1, least=1, most=MAX_N),
        seed=_integer(*seed, default=None, least=-(2**63), most=2**64 - 1),
        max_new_tokens=longest,
        default_max_new_tokens=default,
        min_new_tokens=shortest,
        fields=fields,
    )


def _filters(request: SamplingFields | _Plain, defaults: SamplingDefaults) -> dict[str, Any]:
    bounds = {
        "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0)
    }  # fmt: skip
    filters = {
        name: _number(getattr(request, name), name, default=getattr(defaults, name), least=least, most=most)
        for name, (least, most) in bounds.items()
    }
    return {**filters, "top_k": _integer(request.top_k, "top_k", default=defaults.top_k, least=-1, most=2**63)}


def check_top_logprobs(value: int | None, param: str, most: int) -> int:
    return _integer(value, param, default=0, least=0, most=most)


def _fault(param: str, sentence: str) -> RequestError:
    return RequestError(f"`{param}` {sentence}", param=param)


def _integer(value: int | None, param: str, *, default: Any, least: int, most: int) -> Any:
    if value is None:
        return default
    if not least <= value <= most:
        raise _fault(param, f"must be between {least} and {most}")
    return value


def _number(value: float | None, param: str, *, default: float, least: float, most: float) -> float:
    if value is None:
        return default
    if not (math.isfinite(value) and least <= value <= most):
        raise _fault(param, f"must be a number between {least:g} and {most:g}")
    return float(value)


def _stop(stop: str | list[str] | None) -> tuple[bytes, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(texts) > MAX_STOPS:
        raise _fault("stop", f"takes at most {MAX_STOPS} strings")
    encoded = tuple(text.encode() for text in texts)
    if any(not 1 <= len(text) <= MAX_STOP_BYTES for text in encoded):
        raise _fault("stop", f"takes strings of 1 to {MAX_STOP_BYTES} bytes")
    return encoded


def check_ids(ids: list[int] | None, param: str, most: int, vocab_size: int) -> tuple[int, ...]:
    ids = ids or []
    if len(ids) > most:
        raise _fault(param, f"takes at most {most} ids")
    if any(not 0 <= token < vocab_size for token in ids):
        raise _fault(param, f"takes ids between 0 and {vocab_size - 1}")
    return tuple(ids)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Sorted by id: the order must not depend on the client."""
    bias = bias or {}
    if len(bias) > MAX_BIASES:
        raise _fault("logit_bias", f"takes at most {MAX_BIASES} entries")
    entries = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise _fault("logit_bias", f"takes token ids between 0 and {vocab_size - 1} as keys")
        entries[int(key)] = _number(value, "logit_bias", default=0.0, least=-100.0, most=100.0)
    return tuple(sorted(entries.items()))
