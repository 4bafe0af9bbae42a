"""L1, frontend: server-sent events, written by the receive loop itself.

A `Stream` is the sink of one streaming HTTP request. What one burst brings goes out in one write, past aiohttp's
writer, which would cost a task switch per token. What waits is joined: a client that reads slowly gets fewer and larger
events, so that little waits for it, and one that stops reading altogether loses its request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import HttpVersion11, web

from srt.frontend.answers import COMMON_HEADERS, Response
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation, Prompt, error_of, join
from srt.frontend.metrics import Metrics
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.messages import TextDelta

SOFT_LIMIT = 256 * 1024  # bytes unsent from which deltas wait
HARD_LIMIT = 65536  # deltas that wait, at which the request ends
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
    def __init__(self, form: Format, metrics: Metrics) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()  # the first delta is there, or the error
        self.done: asyncio.Future[None] = loop.create_future()
        self._form = form
        self._metrics = metrics
        self._generations: Sequence[Generation] = ()
        self._unfinished = 0
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self._waiting: dict[Generation, list[TextDelta]] = {}
        self._num_waiting = 0
        self._error = b""
        self._cut = False

    async def respond(self, request: web.Request, manager: TokenizerManager, prompts: Sequence[Prompt]) -> Response:
        """The whole life of a streaming request. RequestError as long as nothing was sent."""
        with manager.running(prompts, self) as generations:
            self._generations = generations
            self._unfinished = len(generations)
            await self.started
            first = self._take_events()  # what cannot be written is an error yet, and no cut stream
            response = web.StreamResponse(headers={**HEADERS, **request[COMMON_HEADERS]})
            self._chunked = request.version >= HttpVersion11
            if not self._chunked:  # nothing else tells where it ends
                response.force_close()
            await response.prepare(request)
            await response.write(first)
            self._transport = request.transport
            manager.flush_soon(self)  # not here: what may be nested as deep as the stack allows finds more room there
            await self.done
        if self._cut:
            response.force_close()
        try:
            await asyncio.wait_for(response.write_eof(), CUT_SECONDS if self._cut else None)
        except asyncio.TimeoutError:
            self._transport.abort()
        except ConnectionError:  # the client has left
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
        self._num_waiting += 1
        if self._transport is None and not self.started.done():
            self.started.set_result(None)

    def flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        over = bool(self._error) or not self._unfinished
        if over:
            if self.done.done():
                return
        elif transport.get_write_buffer_size() > SOFT_LIMIT:
            if self._num_waiting > HARD_LIMIT:
                self._cut = True
                transport.set_write_buffer_limits(0)  # then the answer's end is awaited however little is unsent
                self.fail(RequestError("The client reads too slowly.", status=503))
            return
        data = self._take_events()
        if over:
            data += self._error or self._form.tail(self._generations)
        if data and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if over:
            self.done.set_result(None)

    def fail(self, error: RequestError) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        elif not self._error:
            self._error = self._form.failure(error)
            self.flush()

    def _take_events(self) -> bytes:
        waiting, self._waiting, self._num_waiting = self._waiting, {}, 0
        events = []
        for generation, deltas in waiting.items():
            if generation.finish is not None:
                self._metrics.written(generation, time.monotonic())
            events.append(self._form.events(generation, join(deltas)))
        return b"".join(events)
