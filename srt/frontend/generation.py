"""L1, frontend: one choice of one prompt on its way, as the request table and the sinks see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from srt.frontend.balancer import Assignment
from srt.frontend.errors import RequestError
from srt.frontend.sampling import SamplingSpec
from srt.messages import Finish, Grammar, Ids, TextDelta, TokenLogprobs, joined
from srt.observe.timeline import Arrival, Timeline

MAX_RATINGS = 2**22  # log-probabilities of an answer that are kept until it ends
RATINGS_PER_DELTA = 16  # which take as long to write, and as much memory until then, as a delta without any


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a client's request, tokenised and checked; it becomes `spec.n` generations."""

    name: str  # the request id that the client sees
    ids: Ids
    spec: SamplingSpec
    namespace: bytes = b""
    priority: int = 0
    batch: str | None = None  # what the client called all its prompts together, if this is one of several
    grammar: Grammar | None = None  # of each output
    is_named: bool = False  # by the client, who may have sent another one of this name

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


class Generation(msgspec.Struct, eq=False):
    rid: int  # the number under which the other processes know it
    name: str  # the client's name for it
    index: int  # among all choices of the HTTP request
    prompt: Prompt
    sink: Sink
    assignment: Assignment
    timeline: Timeline
    arrived: Arrival  # of all choices of the HTTP request
    completion_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0  # of the cached ones, from host memory
    reasoning_tokens: int = 0  # known at the end
    last_token: float = 0.0  # when it came here, in monotonic seconds
    finish: Finish | None = None

    @property
    def logprobs(self) -> int:
        return self.prompt.spec.logprobs

    @property
    def names(self) -> tuple[str, ...]:
        """Under which a client may abort it: its own, its prompt's and its batch's."""
        prompt = self.prompt
        return (self.name, prompt.name) if prompt.batch is None else (self.name, prompt.name, prompt.batch)


class Sink(Protocol):
    """Where the receive loop leaves what came for one HTTP request. No method may block or raise."""

    def feed(self, generation: Generation, delta: TextDelta) -> None: ...

    def flush(self) -> None:
        """Called once after a burst of `feed`."""

    def fail(self, error: RequestError) -> None:
        """Nothing more will come."""


def error_of(finish: Finish | None) -> RequestError | None:
    """An abort that is the server's doing is an error; one that the client asked for is an answer."""
    if finish is None or finish.reason != "abort" or not finish.status:
        return None
    return RequestError(finish.message or "The request was aborted.", status=finish.status)


def join(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta that says what these said, one after the other, of one generation."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return TextDelta(
        deltas[0].rid,
        "".join([delta.text for delta in deltas]),
        b"".join([delta.ids for delta in deltas]),
        deltas[0].cached_tokens,
        deltas[-1].finish,
        joined(logprobs) if logprobs else None,
        deltas[0].prompt_logprobs,
        restored_tokens=deltas[0].restored_tokens,
    )


def ratings(delta: TextDelta) -> int:
    """How many log-probabilities a delta brings, alternatives included, of which all positions have as many."""
    return sum(map(_ratings, (delta.logprobs, delta.prompt_logprobs)))


def too_many_ratings(what: str, most: int, remedy: str) -> RequestError:
    return RequestError(
        f"{what} has more than {most} log-probabilities, alternatives and those of the prompt included; ask for fewer "
        f"alternatives, tokens or choices in one request, or set {remedy}.",
        param="stream",
    )


def _ratings(logprobs: TokenLogprobs | None) -> int:
    if logprobs is None or not logprobs.chosen:
        return 0
    return len(logprobs.chosen) * (1 + len(logprobs.top_ids[-1]) + len(logprobs.asked[-1] if logprobs.asked else ()))


class Collector:
    """The sink of a request that is answered in one piece."""

    def __init__(self, prompts: Sequence[Prompt], loop: asyncio.AbstractEventLoop) -> None:
        self._deltas: list[list[TextDelta]] = [[] for prompt in prompts for _ in range(prompt.spec.n)]
        self._unfinished = len(self._deltas)
        self._ratings = 0
        self.done: asyncio.Future[None] = loop.create_future()

    @property
    def size(self) -> int:
        """In deltas without log-probabilities that would take as long to write."""
        return sum(map(len, self._deltas)) + self._ratings // RATINGS_PER_DELTA

    @property
    def answers(self) -> list[TextDelta]:
        """The whole output of each generation, by index, once all are done."""
        return list(map(join, self._deltas))

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        if error := error_of(delta.finish):
            self.fail(error)
            return
        self._deltas[generation.index].append(delta)
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            self._ratings += ratings(delta)
            if self._ratings > MAX_RATINGS:
                self.fail(too_many_ratings("The answer", MAX_RATINGS, "`stream`: true"))
        if delta.finish is None:
            return
        self._unfinished -= 1
        if not self._unfinished and not self.done.done():
            self.done.set_result(None)

    def flush(self) -> None:
        pass

    def fail(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
