"""L1, main process: one choice of one prompt on its way, as the request table and the sinks see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from srt.frontend.errors import RequestError
from srt.frontend.sampling import SamplingSpec
from srt.messages import Finish, Ids, TextDelta, TokenLogprobs


@dataclass(frozen=True)
class Prompt:
    """One prompt of a client's request, tokenised and checked; it becomes `spec.n` generations."""

    name: str  # the request id that the client sees
    ids: Ids
    spec: SamplingSpec
    namespace: bytes = b""
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


@dataclass(eq=False)
class Generation:
    rid: int  # the number under which the other processes know it
    name: str  # the client's name for it
    index: int  # among all choices of the HTTP request
    prompt: Prompt
    sink: Sink
    created: float  # monotonic seconds, as all times here
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    finish: Finish | None = None
    finished: float = 0.0

    @property
    def logprobs(self) -> int:
        return self.prompt.spec.logprobs


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


@dataclass
class Logprobs:
    """Of the tokens so far."""

    chosen: list[float] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top: list[tuple[float, ...]] = field(default_factory=list)


@dataclass
class Answer:
    """All of one generation's output."""

    texts: list[str] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: Logprobs = field(default_factory=Logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def as_delta(self, generation: Generation) -> TextDelta:
        """As if all of it had come at once."""
        logprobs = None
        if generation.logprobs >= 0:
            taken = self.logprobs
            logprobs = TokenLogprobs(tuple(taken.chosen), tuple(taken.top_ids), tuple(taken.top))
        return TextDelta(generation.rid, self.text, bytes(self.ids), finish=generation.finish, logprobs=logprobs)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.ids += delta.ids
        if delta.logprobs is not None:
            self.logprobs.chosen += delta.logprobs.chosen
            self.logprobs.top_ids += delta.logprobs.top_ids
            self.logprobs.top += delta.logprobs.top


class Collector:
    """The sink of a request that is answered in one piece."""

    def __init__(self, num_choices: int, done: Any) -> None:
        """`done` is a future that this sink resolves."""
        self.answers = [Answer() for _ in range(num_choices)]
        self.done = done
        self._open = num_choices

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        self.answers[generation.index].add(delta)
        if delta.finish is None:
            return
        if error := error_of(delta.finish):
            self.fail(error)
            return
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)

    def flush(self) -> None:
        pass

    def fail(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
