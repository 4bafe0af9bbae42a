"""One request that has several features at once, sent over one route to a server that has them too."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from pairs.reference import Ask, Expected, Reference
from pairs.routes import Answer
from server.server_harness import PATIENCE, Client, wait_until

RID = "under-test"


class Feature(Protocol):
    """An instance is one trial's."""

    name: str
    does: str
    """To the request."""
    proof: str
    """What the oracle looks at."""
    flags: tuple[str, ...]
    """Of a server that has it."""
    needs_queue: bool
    """The request must wait, with others, until all can begin at once."""

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        """The request with the feature; None if that would change nothing and another prompt is needed."""

    def prepare(self, trial: Trial) -> None:
        """Before anything else is sent."""

    def send_beside(self, trial: Trial) -> None:
        """What shall run beside the request, and was there first."""

    def meanwhile(self, trial: Trial) -> None:
        """While it is answered."""

    def check(self, trial: Trial) -> None:
        """The oracle. AssertionError for what is wrong with the answer."""


class Trial:
    def __init__(self, server: Client, route: Any, features: Sequence[Feature], ask: Ask, reference: Reference) -> None:
        self.server, self.route, self.ask, self.reference = server, route, ask, reference
        self.features = features
        self.has = frozenset(feature.name for feature in features)
        self.answer = Answer([])
        self._num_beside = 0
        self._threads = ThreadPoolExecutor(3)

    @property
    def expected(self) -> list[Expected]:
        """Of a request that was taken away what it might have been told until then."""
        ask = self.ask
        if any(choice.reason == "abort" for choice in self.answer.choices):
            ask = replace(ask, max_tokens=min(ask.max_tokens, self.answer.completion_tokens))
        return self.reference.choices(ask)

    def run(self) -> None:
        """Sends it and asks all oracles."""
        with self._threads:
            for feature in reversed(self.features):
                feature.prepare(self)
            if any(feature.needs_queue for feature in self.features):
                self._begin_together()
            else:
                self._sent = self._threads.submit(self._send)
            for feature in reversed(self.features):
                feature.meanwhile(self)
            self.answer = self._sent.result()
        self.check_answer()
        for feature in self.features:
            feature.check(self)

    def _begin_together(self) -> None:
        self.server.ask("/pause_generation", mode="in_place")
        try:
            for feature in self.features:
                feature.send_beside(self)
            self._wait_for_queue(self._num_beside)
            self._sent = self._threads.submit(self._send)
            self._wait_for_queue(self._num_beside + self.ask.n)
        finally:
            self.server.ask("/continue_generation")

    def again(self, **changes: Any) -> Answer:
        return self._ask(replace(self.ask, **changes))

    def send_beside(self, count: int, **body: Any) -> Future[Any]:
        """Other requests, to /generate; their answers."""
        self._num_beside += count
        return self._threads.submit(lambda: self.server.ask("/generate", **body))

    @property
    def is_over(self) -> bool:
        return self._sent.done()

    @property
    def retractions(self) -> int:
        """Of all requests, since the server's start."""
        return self._gauge("retractions_total")

    @property
    def generated(self) -> int:
        """Tokens of all requests, since the server's start."""
        return self._gauge("generated_tokens_total")

    def check_answer(self) -> None:
        """Whatever the features: what the reference says, up to where somebody took the request away."""
        choices = self.answer.choices
        assert len(choices) == self.ask.n
        for choice, expected in zip(choices, self.expected, strict=True):
            text = self.text_of(choice)
            if choice.reason == "abort" and choice.calls:
                pass  # calls that were cut are for Tools' oracle
            elif choice.reason == "abort":
                assert text == expected.text if self.ask.n == 1 else expected.text.startswith(text.rstrip("\ufffd"))
            else:
                wanted = expected.text, expected.reason, expected.matched
                said = text, choice.reason, choice.matched
                assert said == wanted, f"{said} is not {wanted}"

    def text_of(self, choice: Any) -> str:
        """As the model wrote it, as far as an answer with calls tells that."""
        functions = [call["function"] for call in choice.calls]
        calls = [
            f'<tool_call>\n{{"name": "{each["name"]}", "arguments": {each["arguments"]}}}\n</tool_call>'
            for each in functions
        ]
        return choice.text + "\n".join(calls)

    def _gauge(self, name: str) -> int:
        return self.server.info()["internal_states"][0][name]

    def _send(self) -> Answer:
        return self._ask(self.ask, rid=RID)

    def _ask(self, ask: Ask, **extra: Any) -> Answer:
        body = self.route.body(ask) | extra
        if not ask.stream:
            return self.route.read(ask, self.server.ask(self.route.path, **body))
        with self.server.stream(self.route.path, **body) as events:
            assert events.status == 200, events.read()
            said = list(events)
            assert events.done
        return self.route.join(ask, said)

    def _wait_for_queue(self, count: int) -> None:
        waiting = lambda: self.server.loads()["num_waiting_reqs"]  # noqa: E731
        wait_until(lambda: waiting() == count, PATIENCE, lambda: f"{waiting()} requests wait, not {count}")
