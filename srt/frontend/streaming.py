"""L1, frontend: server-sent events, written by the receive loop itself.

A `Stream` is the sink of one streaming HTTP request. What one burst brings goes out in one write, past aiohttp's
writer, which would cost a task switch per token. What waits is joined: a client that reads slowly gets fewer and larger
events, so that little waits for it, and one that stops reading altogether loses its request. However much waits, little
of it is written in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import HttpVersion11, web

from srt.frontend.answers import COMMON_HEADERS, Response, Streamed, head
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

EVENTS = "text/event-stream; charset=utf-8"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
_BREAKS = re.compile("\u0085|\u2028|\u2029".encode())  # where some clients end a line; they stand in JSON strings only
TOO_SLOW = RequestError("The client reads too slowly.", status=503)


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


class Backlog:
    """What of a stream waits to be written: each choice's deltas, in their order."""

    def __init__(self, form: Format, metrics: Metrics) -> None:
        self.size = 0  # as HARD_LIMIT counts
        self._form = form
        self._metrics = metrics
        self._waiting: dict[Generation, list[TextDelta]] = {}

    def add(self, generation: Generation, delta: TextDelta) -> None:
        self._waiting.setdefault(generation, []).append(delta)
        self.size += _size(delta)

    def clear(self) -> None:
        self.size, self._waiting = 0, {}

    def take(self) -> bytes:
        """The events of all that waits, or of as much of it as may be written in one turn."""
        is_much, waiting = self.size > TURN, self._waiting
        self.clear()
        events, written, room = [], 0, TURN
        for generation, deltas in waiting.items():
            rest: Sequence[TextDelta] = ()
            if is_much:
                count, room = _fitting(deltas, room)
                deltas, rest = deltas[:count], deltas[count:]
            if deltas:
                if deltas[-1].finish is not None:
                    self._metrics.written(generation, time.monotonic())
                event = self._form.events(generation, join(deltas))
                events.append(event)
                written += len(event)
                if written >= PIECE:
                    is_much, room = True, 0
            if rest:
                self._waiting[generation] = rest
                self.size += sum(map(_size, rest))
        return b"".join(events)


class Stream:
    """`respond` writes the head and the first events, `flush` what is behind them."""

    def __init__(self, form: Format, manager: TokenizerManager) -> None:
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()  # the first delta is there, or the error
        self._over: asyncio.Future[None] = loop.create_future()  # the last one is there, or an error instead
        self._form = form
        self._manager = manager
        self._generations: Sequence[Generation] = ()
        self._unfinished = 0  # of these, from which more will come
        self._backlog = Backlog(form, manager.metrics)
        self._error: RequestError | None = None  # with which the answer ends instead of its tail
        self._transport: asyncio.Transport | None = None  # from the first events' end to the answer's
        self._chunked = False
        self._is_behind = False  # the next turn of the event loop will write more of what waits

    async def respond(self, request: web.Request, prompts: Sequence[Prompt]) -> Response:
        """The whole life of a streaming request. RequestError as long as nothing was sent."""
        with self._manager.running(prompts, self) as generations:
            self._generations = generations
            self._unfinished = len(generations)
            await self._started
            first = self._backlog.take()  # what cannot be written is an error yet, and no cut stream
            transport = request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError
            self._chunked = request.version >= HttpVersion11
            response = Streamed(self._chunked and request.keep_alive)  # else nothing tells where it ends
            length = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
            headers = {**HEADERS, **request[COMMON_HEADERS]}
            begin = head(request.version, response.status, EVENTS, response.keep_alive, length, headers)
            transport.write(begin + self._framed(first))
            self._transport = transport
            self._write_soon()
            await self._over
            with contextlib.suppress(ConnectionError):  # the client has left
                while self._transport is not None:  # what waits yet goes out as fast as the client reads
                    self._write_soon()
                    await asyncio.sleep(0)
                    if self._backlog.size:
                        await request.writer.drain()
        if self._error is TOO_SLOW:
            response.keep_alive = False
            asyncio.get_running_loop().call_later(CUT_SECONDS, transport.abort)
        with contextlib.suppress(ConnectionError):
            await request.writer.drain()
        return response

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        if not self._unfinished:  # there was an error
            return
        if delta.finish is not None:
            if error := error_of(delta.finish):
                self.fail(error)
                return
            self._unfinished -= 1
            if not self._unfinished:
                self._end()
        self._backlog.add(generation, delta)
        if self._transport is None and not self._started.done():
            self._started.set_result(None)

    def flush(self) -> None:
        transport = self._transport
        if transport is None or self._is_behind:
            return
        if self._unfinished and transport.get_write_buffer_size() > SOFT_LIMIT:
            if self._backlog.size > HARD_LIMIT:
                self._backlog.clear()
                self.fail(TOO_SLOW)
            return
        data, end = self._backlog.take(), b""
        if not self._unfinished and not self._backlog.size:
            if self._error is None:
                data += self._form.tail(self._generations)  # if it cannot be written, an error shall be the end
            self._transport = None
            if self._error is not None:
                data += self._form.failure(self._error)
            end = b"0\r\n\r\n" if self._chunked else b""
        if (data or end) and not transport.is_closing():
            transport.write(self._framed(data) + end)
        if self._unfinished and self._backlog.size:
            self._write_soon()

    def fail(self, error: RequestError) -> None:
        if not self._started.done():
            self._started.set_exception(error)
        elif self._error is None:
            self._error = error
            self._end()

    def _framed(self, data: bytes) -> bytes:
        if not data.isascii():
            data = _BREAKS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), data)
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data

    def _end(self) -> None:
        """Nothing more will come."""
        self._unfinished = 0
        if not self._over.done():
            self._over.set_result(None)

    def _write_soon(self) -> None:
        """In the next turn of the event loop, where what may be nested as deep as the stack allows finds more room."""
        if not self._is_behind:
            self._is_behind = True
            asyncio.get_running_loop().call_soon(self._write_now)

    def _write_now(self) -> None:
        self._is_behind = False
        self._manager.flush((self,))


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
