"""L1, every process that speaks HTTP: the table of requests on their way, and the frontend's two pipes.

Owns the rids, the names under which clients know their requests, and the receive loop. Deltas go from the pipe straight
to the sinks: no task wakes for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from srt.config import ServerConfig
from srt.frontend.balancer import Balancer
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation, Prompt, Sink
from srt.frontend.metrics import Metrics
from srt.frontend.request_log import RequestLog
from srt.frontend.request_size import check_size
from srt.frontend.request_traces import RequestTraces
from srt.frontend.sampling import seeds
from srt.frontend.tally import Tally
from srt.limits import Limits
from srt.messages import (
    AbortRequest,
    Finish,
    FrontendItem,
    NewRequest,
    Order,
    TextBatch,
)
from srt.observe.timeline import Timeline, arrival
from srt.transport import BurstSender, Endpoints, Sender, pull

log = logging.getLogger(__name__)

BURST = 64  # messages taken from the pipe before the event loop gets its turn
REPLY_SECONDS = 10.0  # for an engine to answer, beside what it was told to wait


class TokenizerManager:
    def __init__(
        self,
        config: ServerConfig,
        limits: Limits,
        endpoints: Sequence[Endpoints],
        metrics: Metrics,
        balancer: Balancer,
        traces: RequestTraces,
        tally: Tally,
        process: int = 0,
    ) -> None:
        """`endpoints` of each engine. Of several processes that speak HTTP this is number `process`."""
        self.limits = limits
        self.metrics = metrics
        self.tally = tally
        self.failure: str | None = None
        self.last_heard = 0.0  # when the detokenizer last sent anything, in monotonic seconds
        self.last_token = 0.0  # when a token last came
        self.request_log = RequestLog()
        self._most = None  # requests that may run or wait, in all processes together
        if config.max_queued_requests is not None:
            self._most = config.max_running_requests * len(endpoints) + config.max_queued_requests
        self._endpoints = endpoints
        self._balancer = balancer
        self._traces = traces
        numbers = config.frontends + process, config.frontends  # no other process has these
        self._seeds = seeds(config.random_seed, itertools.count(*numbers))
        self._rids = itertools.count(*numbers)
        self._process = process
        self._tickets = itertools.count(1)
        self._live: dict[int, Generation] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}  # by ticket
        self.on_order: Callable[[Order], None] | None = None  # of the main process, which gives none to itself
        self._decoder = msgspec.msgpack.Decoder(FrontendItem)

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Must be called in the event loop."""
        self.loop = asyncio.get_running_loop()
        self.last_heard = time.monotonic()
        self._context = zmq.Context()
        self._socket = pull(self._endpoints[0].frontend_of(self._process), self._context)
        self.leaders = [BurstSender(one.leader, self._context, self.loop) for one in self._endpoints]
        self.loop.add_reader(self._socket.getsockopt(zmq.FD), self._receive)
        self.loop.call_soon(self._receive)  # the descriptor signals only what comes from now on

    def close(self) -> None:
        for leader in self.leaders:
            leader.flush()
        self.loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._context.destroy(linger=0)

    def fail(self, reason: str) -> None:
        """The engine is gone: ends every request with an error."""
        self.failure = reason
        self.cut(RequestError(f"The engine has failed: {reason}", status=500))

    def cut(self, error: RequestError) -> None:
        """Ends every request."""
        for generation in list(self._live.values()):
            generation.sink.fail(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    # ---- requests --------------------------------------------------------------------------------------------------

    def running(self, prompts: Sequence[Prompt], sink: Sink, *, probe: bool = False) -> Running:
        """Sends the prompts' generations; on leaving, what has not finished is aborted. RequestError if refused.

        A probe is taken however long the queue is.
        """
        return Running(self, prompts, self._submit(prompts, sink, probe))

    def abort(self, name: str | None, message: str) -> None:
        """All of whose names one begins with the words of `name`; None aborts all. Last deltas still come."""
        for generation in self._live.values():
            if name is None or any(_begins_with(one, name) for one in generation.names):
                self.leaders[generation.assignment.engine].send(AbortRequest(generation.rid, message))
        for leader in self.leaders:
            leader.flush()  # what another process asks of the engines once it knows comes behind it

    def sender(self, address: str) -> Sender:
        """To another process, for as long as this is not closed."""
        return Sender(address, self._context)

    async def ask(
        self,
        whom: Sender | BurstSender,
        item: Callable[[int], Any],
        timeout_s: float = REPLY_SECONDS,
        name: str = "The engine",
    ) -> Any:
        """What is replied to the item with its ticket. RequestError if nothing is."""
        ticket = next(self._tickets)
        future = self._asked[ticket] = self.loop.create_future()
        try:
            whom.send(item(ticket))
            return await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            raise RequestError(f"{name} did not answer in time; it may do what was asked yet.", status=503) from None
        finally:
            del self._asked[ticket]

    @property
    def house(self) -> str:
        """Path of the main process's own HTTP socket."""
        return self._endpoints[0].house

    @property
    def live(self) -> Collection[Generation]:
        """All that are on their way, the oldest first."""
        return self._live.values()

    @property
    def is_open(self) -> bool:
        return self.failure is None and not self.tally.closed

    def check_open(self) -> None:
        if self.failure is not None:
            raise RequestError(f"The engine has failed: {self.failure}", status=503)
        if self.tally.closed:
            raise RequestError("The server is shutting down.", status=503)

    def check_queue(self) -> None:
        """RequestError unless one more request may run or wait beside those that do."""
        if self._most is not None and self.tally.total >= self._most:
            raise _queue_full()

    def _submit(self, prompts: Sequence[Prompt], sink: Sink, probe: bool) -> list[Generation]:
        total, wanted = 0, []
        for prompt in prompts:
            total += prompt.spec.n
            wanted.append((prompt, prompt.spec.resolve_max_new_tokens(prompt.num_tokens, self.limits)))
        if total > 1:
            check_size(prompts, total)
        if not self.tally.take(total, None if probe else self._most):
            raise _queue_full()
        try:
            self.check_open()  # only now: whoever closes the door looks for requests behind it, and must not miss these
            if prompts[0].is_named and not self.tally.take_names(_names(prompts)):
                raise RequestError("A request with this `rid` is running already.", param="rid", code="duplicate_rid")
        except RequestError:
            self.tally.give(total)
            raise
        arrived = arrival()
        generations: list[Generation] = []
        for prompt, length in wanted:
            spec = prompt.spec
            seed = next(self._seeds) if spec.seed is None else spec.seed
            for choice in range(spec.n):
                name = prompt.name if spec.n == 1 else f"{prompt.name}_{choice}"
                assignment = self._balancer.assign(prompt.namespace, prompt.ids)
                rid, timeline = next(self._rids), Timeline.of(arrived)
                generation = Generation(rid, name, len(generations), prompt, sink, assignment, timeline, arrived)
                generations.append(generation)
                self._live[rid] = generation
                self.request_log.came(generation)
                params = spec.params(length, seed, choice)
                timeline.sent = time.monotonic()
                self.leaders[assignment.engine].send(
                    NewRequest(rid, prompt.ids, params, prompt.namespace, prompt.priority, prompt.grammar)
                )
        return generations

    def release(self, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> None:
        """Of `Running`, which is left."""
        now = time.monotonic()
        for generation in generations:
            if generation.finish is not None and not generation.timeline.written:
                self.metrics.written(generation, now)
            del generation.sink  # which knows its generations: they and their prompts shall not wait for the collector
            if self._live.pop(generation.rid, None) is not None:
                self.tally.give(1)
                self.request_log.ended(generation)
                self.leaders[generation.assignment.engine].send(AbortRequest(generation.rid, "The client has left."))
                self._balancer.ended(generation.assignment)
                self.metrics.aborted()
                generation.timeline.gone = now
            self._traces.ended(generation)
        if prompts[0].is_named:
            self.tally.give_names(_names(prompts))

    # ---- the receive loop ------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Takes what is there, at most BURST messages, and lets every sink that got something write once."""
        if self._socket.closed:  # since this turn was asked for
            return
        touched: dict[Sink, None] = {}
        now = time.monotonic()
        for _ in range(BURST):
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._take(self._decoder.decode(raw), now, touched)
            except Exception:  # the messages behind it must not wait for the next one
                log.exception("A message from the engine was not understood")
        else:
            self.loop.call_soon(self._receive)
        self.flush(touched)

    @staticmethod
    def flush(sinks: Iterable[Sink]) -> None:
        """Lets sinks write that have got something."""
        for sink in sinks:
            try:
                sink.flush()
            except Exception:  # one client's answer must not take the others' with it
                log.exception("An answer could not be written")
                sink.fail(RequestError("The answer could not be written.", status=500))

    def _take(self, message: Any, now: float, touched: dict[Sink, None]) -> None:
        if isinstance(message, TextBatch):
            self._take_text(message, now, touched)
        elif self.on_order is not None:
            self.on_order(message)
        else:
            future = self._asked.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message)

    def _take_text(self, batch: TextBatch, now: float, touched: dict[Sink, None]) -> None:
        """What one step of one engine gave."""
        self.last_heard = now
        if batch.step and not batch.deltas:  # there were tokens, of requests of other processes
            self.last_token = now
        live, assignment = self._live, None
        generated, gaps = 0, {}
        for delta in batch.deltas:
            generation = live.get(delta.rid)
            if generation is None:  # its client has left
                continue
            if delta.cached_tokens >= 0:
                generation.cached_tokens, generation.restored_tokens = delta.cached_tokens, delta.restored_tokens
                if delta.started is not None:
                    generation.timeline.start(delta.started)
            if delta.ids:
                tokens = len(delta.ids) // 4
                generated += tokens
                generation.completion_tokens += tokens
                if generation.last_token:
                    gap = (now - generation.last_token) / tokens
                    gaps[gap] = gaps.get(gap, 0) + tokens
                else:
                    generation.timeline.first_token = batch.computed
                    self.metrics.first_token(generation, now)
                generation.last_token = self.last_token = now
                assignment = generation.assignment
                self._balancer.heard(assignment, delta.ids)
                self.request_log.said(generation, delta.ids)
            if delta.finish is not None:
                self._end(generation, delta.finish, batch, now)
            sink = generation.sink
            sink.feed(generation, delta)
            touched[sink] = None
        if assignment is not None:
            self.metrics.tokens(assignment.engine, generated, gaps)

    def _end(self, generation: Generation, finish: Finish, batch: TextBatch, now: float) -> None:
        generation.finish = finish
        generation.timeline.end(batch, now)
        if not generation.completion_tokens:  # none was wanted: its way ends as the first token's would
            generation.timeline.first_token = batch.computed
        del self._live[generation.rid]
        self.tally.give(1)
        self.request_log.ended(generation)
        self._balancer.ended(generation.assignment)
        if finish.reason == "abort":
            self.metrics.aborted()
        else:
            self.metrics.finished(generation)


class Running(NamedTuple):
    """A context for the generations of some prompts, which are on their way as long as somebody is in it."""

    manager: TokenizerManager
    prompts: Sequence[Prompt]
    generations: list[Generation]

    def __enter__(self) -> list[Generation]:
        return self.generations

    def __exit__(self, *_: object) -> None:
        self.manager.release(self.prompts, self.generations)


def _begins_with(name: str, beginning: str) -> bool:
    """A beginning ends where a word does: whoever aborts `job1` means `job1_0` too, but not `job10`."""
    rest = name[len(beginning) :]
    return name.startswith(beginning) and not (beginning[-1].isalnum() and rest[:1].isalnum())


def _names(prompts: Sequence[Prompt]) -> list[str]:
    """Of the prompts, their choices and their batch. They need a guard only if a client has chosen them, which it does
    for all prompts of a request or for none: nobody can guess the others."""
    names = [prompt.name for prompt in prompts]
    names += [f"{prompt.name}_{i}" for prompt in prompts if prompt.spec.n > 1 for i in range(prompt.spec.n)]
    return names if prompts[0].batch is None else [*names, prompts[0].batch]


def _queue_full() -> RequestError:
    return RequestError("The request queue is full; try again later.", status=503, code="queue_full")
