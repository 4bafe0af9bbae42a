"""L1, frontend: server-sent events, written by the receive loop itself.

A `Stream` is the sink of one streaming HTTP request. What one burst brings goes out in one write, past aiohttp's
writer, which would cost a task switch per token. What waits is joined: a client that reads slowly gets fewer and larger
events, so that little waits for it, and one that stops reading altogether loses its request. However much waits, little
of it is written in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import HttpVersion11, web

from srt.frontend.answers import COMMON_HEADERS, Response
from srt.frontend.errors import RequestError
from srt.frontend.generation import RATINGS_PER_DELTA, Generation, Prompt, error_of, join, ratings
from srt.frontend.metrics import Metrics
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.messages import TextDelta

SOFT_LIMIT = 256 * 1024  # bytes unsent from which deltas wait
HARD_LIMIT = 65536  # deltas that wait, at which the request ends; RATINGS_PER_DELTA log-probabilities count as one
TURN = 2048  # of these that one turn of the event loop writes, about 20 ms of log-probabilities
PIECE = 256 * 1024  # bytes with which a turn has written enough
CUT_SECONDS = 10.0  # for its client to read why; then its connection ends, too

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one route writes: a body, or events, complete ones, each `data: …` and an empty line."""

    def body(self, generations: Sequence[Generation], answers: Sequence[TextDelta]) -> Any:
        """All in one piece, for JSON."""

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        """May be empty."""

    def tail(self, generations: Sequence[Generation]) -> bytes:
        """What comes after the last choice's end."""

    def failure(self, error: RequestError) -> bytes:
        """What comes instead of all that is left."""


def error_event(error: RequestError) -> bytes:
    return b"data: %b\n\n%b" % (error.body(), DONE)


class Stream:
    def __init__(self, form: Format, metrics: Metrics, manager: TokenizerManager) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()  # the first delta is there, or the error
        self.done: asyncio.Future[None] = loop.create_future()
        self._form = form
        self._metrics = metrics
        self._manager = manager
        self._generations: Sequence[Generation] = ()
        self._unfinished = 0
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self._waiting: dict[Generation, list[TextDelta]] = {}
        self._num_waiting = 0  # as HARD_LIMIT counts
        self._error = b""
        self._cut = False
        self._is_behind = False  # the next turn of the event loop will write more of what waits
        self._ended = False

    async def respond(self, request: web.Request, prompts: Sequence[Prompt]) -> Response:
        """The whole life of a streaming request. RequestError as long as nothing was sent."""
        with self._manager.running(prompts, self) as generations:
            self._generations = generations
            self._unfinished = len(generations)
            await self.started
            first = self._take_events()  # what cannot be written is an error yet, and no cut stream
            response = web.StreamResponse(headers={**HEADERS, **request[COMMON_HEADERS]})
            self._chunked = request.version >= HttpVersion11
            if not self._chunked:  # nothing else tells where it ends
                response.force_close()
            await response.prepare(request)
            await request.writer.write(first, drain=False)  # not awaited: who never reads it must be cut off, too
            self._transport = request.transport
            self._write_soon()  # not here: what may be nested as deep as the stack allows finds more room there
            await self.done
            with contextlib.suppress(ConnectionError):  # the client has left
                await self._write_rest(request)
        if self._cut:
            response.force_close()
        try:
            await asyncio.wait_for(response.write_eof(), CUT_SECONDS if self._cut else None)
        except asyncio.TimeoutError:
            self._transport.abort()
        except ConnectionError:
            pass
        return response

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        if delta.finish is not None:
            if error := error_of(delta.finish):
                self.fail(error)
            self._unfinished -= 1
        if self._error:
            return
        if generation in self._waiting:
            self._waiting[generation].append(delta)
        else:
            self._waiting[generation] = [delta]
        self._num_waiting += _size(delta)
        if self._transport is None and not self.started.done():
            self.started.set_result(None)

    def flush(self) -> None:
        transport = self._transport
        if transport is None or self._is_behind or self._ended:
            return
        over = bool(self._error) or not self._unfinished
        if not over and transport.get_write_buffer_size() > SOFT_LIMIT:
            if self._num_waiting > HARD_LIMIT:
                self._cut = True
                self._waiting = {}
                transport.set_write_buffer_limits(0)  # then the answer's end is awaited however little is unsent
                self.fail(RequestError("The client reads too slowly.", status=503))
            return
        data = self._take_events()
        if over and not self._waiting:
            data += self._error or self._form.tail(self._generations)  # if this fails, an error shall be the end
            self._ended = True
        if data and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if over and not self.done.done():
            self.done.set_result(None)
        elif self._waiting and not over:
            self._write_soon()

    def fail(self, error: RequestError) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        elif not self._error:
            self._error = self._form.failure(error)
            self.flush()

    def _write_soon(self) -> None:
        self._is_behind = True
        asyncio.get_running_loop().call_soon(self._write_now)

    def _write_now(self) -> None:
        self._is_behind = False
        self._manager.flush((self,))

    async def _write_rest(self, request: web.Request) -> None:
        """What waits yet when all has come, as fast as the client reads."""
        while not self._ended:
            await request.writer.drain()
            await asyncio.sleep(0)
            self._manager.flush((self,))

    def _take_events(self) -> bytes:
        """What waits, or as much of it as may be written in one turn."""
        is_much = self._num_waiting > TURN
        waiting, self._waiting, self._num_waiting = self._waiting, {}, 0
        events, written, room = [], 0, TURN
        for generation, deltas in waiting.items():
            rest: Sequence[TextDelta] = ()
            if is_much or written >= PIECE:
                count, room = _fitting(deltas, 0 if written >= PIECE else room)
                deltas, rest = deltas[:count], deltas[count:]
            if deltas:
                if deltas[-1].finish is not None:
                    self._metrics.written(generation, time.monotonic())
                events.append(self._form.events(generation, join(deltas)))
                written += len(events[-1])
            if rest:
                self._waiting[generation] = rest
                self._num_waiting += sum(map(_size, rest))
        return b"".join(events)


def _size(delta: TextDelta) -> int:
    """As HARD_LIMIT counts."""
    if delta.logprobs is None and delta.prompt_logprobs is None:
        return 1
    return 1 + ratings(delta) // RATINGS_PER_DELTA


def _fitting(deltas: Sequence[TextDelta], room: int) -> tuple[int, int]:
    """How many of the first deltas fit, at least one if there is any room, and how much room is left then."""
    for count, delta in enumerate(deltas):
        if room <= 0:
            return count, room
        room -= _size(delta)
    return len(deltas), room
