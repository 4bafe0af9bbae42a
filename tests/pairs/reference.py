"""What a request must be answered, computed by transformers' model one token at a time, by rules written down anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import regex
import torch
import transformers
from pairs.tiny_chat import EOS, IM_START, TABLE

from srt.frontend.sampling import mix_seed

ARGUMENTS = {
    "type": "object",
    "properties": {"u": {"enum": ["c", "f", "k", "r"]}, "d": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["u", "d"],
    "additionalProperties": False,
}
CALL = r'<tool_call>\n\{"name": "w", "arguments": \{"u": "[cfkr]", "d": [1-9][0-9]\}\}\n</tool_call>'

_WORD, _LONG = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True)
class Ask:
    """One request, whatever the route that takes it."""

    words: str
    max_tokens: int = 24
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    regex: str | None = None
    tools: bool = False
    parallel_calls: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # alternatives to each token; -1: no log-probabilities at all
    prompt_logprobs: int = -1
    stream: bool = False

    @property
    def prompt(self) -> str:
        """What the model reads: the words as a chat's template puts them."""
        tools = "tools: 1\n" if self.tools else ""
        return f"{tools}<|im_start|>user\n{self.words}<|im_end|>\n<|im_start|>assistant\n"

    @property
    def must_call(self) -> bool:
        """Whether the answer can be nothing but calls, which nothing cuts."""
        return self.tools and self.regex is None

    @property
    def pattern(self) -> str | None:
        """Of whole answers."""
        calls = rf"{CALL}(\n{CALL})*" if self.parallel_calls else CALL
        if self.tools:
            return calls if self.regex is None else f"(?:{self.regex})|(?:{calls})"
        return self.regex


@dataclass(frozen=True)
class Expected:
    """One choice. `logprobs_TV` rate all tokens at each position, before anything was wished of them."""

    tokens: list[int]
    text: str
    reason: str
    matched: str | int | None
    logprobs_TV: np.ndarray
    free: list[int]  # positions at which more than one token could have come
    gap: float  # least distance between the token that came and the next best


def prompt_ids(text: str) -> list[int]:
    """By hand: special tokens, pairs, bytes."""
    ids: list[int] = []
    data = text.encode()
    wide = sorted(range(256, len(TABLE)), key=lambda token: -len(TABLE[token]))
    while data:
        token = next((token for token in wide if data.startswith(TABLE[token])), data[0])
        ids.append(token)
        data = data[len(TABLE[token]) :]
    return ids


class Reference:
    def __init__(self, model: transformers.LlamaForCausalLM) -> None:
        self._model = model
        self._known: dict[tuple[Ask, int], Expected] = {}

    def choices(self, ask: Ask) -> list[Expected]:
        return [self.choice(ask, index) for index in range(ask.n)]

    def choice(self, ask: Ask, index: int = 0) -> Expected:
        if (ask, index) not in self._known:
            with torch.inference_mode():
                self._known[ask, index] = self._choice(ask, index)
        return self._known[ask, index]

    def prompt_logprobs(self, ask: Ask) -> np.ndarray:
        """[positions - 1, vocabulary]: what rates each token of the prompt but the first."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt_ids(ask.prompt)])).logits[0, :-1]
        return logits.double().log_softmax(-1).numpy()

    def _choice(self, ask: Ask, index: int) -> Expected:
        prompt = prompt_ids(ask.prompt)
        seed = None if ask.seed is None else mix_seed(ask.seed, index)
        stops = () if ask.must_call else ask.stop
        stop_ids = (() if ask.must_call else ask.stop_token_ids) + (() if ask.ignore_eos else (EOS,))
        pattern = None if ask.pattern is None else regex.compile(ask.pattern)
        tokens: list[int] = []
        rated, free, gap = [], [], np.inf
        text, said = b"", b""  # `said` has what the grammar sees
        reason, matched = "length", None
        cache, new = transformers.DynamicCache(), prompt
        while len(tokens) < ask.max_tokens:
            logits = self._model(torch.tensor([new]), None, None, cache).logits[0, -1].double()
            rated.append(logits.log_softmax(-1).numpy())
            forbidden = stop_ids if len(tokens) < ask.min_tokens else ()
            scores = _edited(logits.numpy(), ask, prompt, tokens, forbidden)
            if ask.temperature > 0:
                scores = scores / ask.temperature + _gumbel(seed, len(prompt) + len(tokens))
            token, runner_up = _best(scores, pattern, said)
            if runner_up is not None:
                free.append(len(tokens))
                gap = min(gap, scores[token] - scores[runner_up])
            tokens.append(token)
            new = [token]
            before, piece = len(text), b"" if token in (IM_START, EOS) else TABLE[token]
            text, said = text + piece, said + piece
            if len(tokens) >= ask.min_tokens:
                if token in stop_ids:
                    reason, matched, text = "stop", token, text[:before]
                    break
                found = [
                    (at, -len(stop), stop)
                    for stop in map(str.encode, stops)
                    if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0
                ]
                if found:
                    at, _, stop = min(found)
                    reason, matched, text = "stop", stop.decode(), text[:at]
                    break
            if pattern is not None and _is_over(pattern, said):
                reason = "stop"
                break
        logprobs_TV = np.array(rated)
        return Expected(tokens, text.decode(errors="replace"), reason, matched, logprobs_TV, free, gap)


def _edited(logits: np.ndarray, ask: Ask, prompt: list[int], output: list[int], forbidden: tuple) -> np.ndarray:
    scores = logits.copy()
    for token in {*prompt, *output}:
        factor = ask.repetition_penalty
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token in {*output}:
        scores[token] -= ask.presence_penalty + ask.frequency_penalty * output.count(token)
    for token, bias in ask.logit_bias:
        scores[token] += bias
    scores[list(forbidden)] = -np.inf
    return scores


def _best(scores: np.ndarray, pattern: regex.Pattern | None, said: bytes) -> tuple[int, int | None]:
    """The best token that may come, and the next best, if there is a choice."""
    order = (int(token) for token in np.argsort(-scores, kind="stable") if _may_come(pattern, said, int(token)))
    best, other = next(order), next(order, None)
    return best, None if other is None or scores[other] == -np.inf else other


def _may_come(pattern: regex.Pattern | None, said: bytes, token: int) -> bool:
    if pattern is None:
        return True
    if token in (IM_START, EOS):
        return token == EOS and pattern.fullmatch(said.decode("latin-1")) is not None
    return pattern.fullmatch((said + TABLE[token]).decode("latin-1"), partial=True) is not None


def _is_over(pattern: regex.Pattern, said: bytes) -> bool:
    is_whole = pattern.fullmatch(said.decode("latin-1")) is not None
    return is_whole and not any(_may_come(pattern, said, token) for token in range(EOS))


def _gumbel(seed: int, position: int) -> np.ndarray:
    """float64 [V]: the server's documented noise, in integers that wrap as int32 do."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _LONG
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LONG
    z ^= z >> 31
    x = _int32(np.arange(len(TABLE)) * 0x9E3779B9 + (z & _WORD))
    x ^= x >> 16
    x = _int32(x * 0x7FEB352D)
    x ^= _int32(np.array(z >> 32))
    x ^= x >> 15
    x = _int32(x * 0x846CA68B)
    x ^= x >> 16
    return -np.log(-np.log1p(-(x * (2.0**-31 * (1 - 2.0**-23)) + 2.0**-33)))


def _int32(words: np.ndarray) -> np.ndarray:
    return (words + 2**31) % 2**32 - 2**31
