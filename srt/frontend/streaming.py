"""L1, main process: server-sent events, written by the receive loop itself.

A `Stream` is the sink of one streaming HTTP request. Events are collected per burst and go out in one write, past
aiohttp's writer, which would cost a task switch per token. A client that reads slowly has its deltas merged, so that
what waits for it is bounded, and one that stops reading altogether loses its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from aiohttp import HttpVersion11, web

from srt.frontend.errors import RequestError
from srt.frontend.generation import Answer, Generation, Prompt, error_of
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.messages import TextDelta

SOFT_LIMIT = 256 * 1024  # bytes unsent from which deltas are merged
HARD_LIMIT = 4 * 1024 * 1024  # characters merged at which the request ends

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one route writes its events: complete ones, each `data: …` and an empty line."""

    def events(self, generation: Generation, delta: TextDelta) -> bytes:
        """May be empty."""

    def tail(self, generations: Sequence[Generation]) -> bytes:
        """What comes after the last choice's end, without [DONE]."""


class Stream:
    def __init__(self, form: Format) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()  # the first delta is there, or the error
        self.done: asyncio.Future[None] = loop.create_future()
        self._form = form
        self._generations: Sequence[Generation] = ()
        self._unfinished = 0
        self._failed = False
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self._events: list[bytes] = []
        self._merged: dict[Generation, Answer] = {}
        self._merged_size = 0

    async def respond(
        self, request: web.Request, manager: TokenizerManager, prompts: Sequence[Prompt]
    ) -> web.StreamResponse:
        """The whole life of a streaming request. RequestError as long as nothing was sent."""
        with manager.running(prompts, self) as generations:
            self._generations = generations
            self._unfinished = len(generations)
            await self.started
            response = web.StreamResponse(headers=HEADERS)
            await response.prepare(request)
            await response.write(self._take_events())
            self._chunked = request.version >= HttpVersion11
            self._transport = request.transport
            self.flush()
            await self.done
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        if self._failed:
            return
        if error := error_of(delta.finish):
            self.fail(error)
            return
        if self._merged or self._is_behind():
            self._merge(generation, delta)
        else:
            self._events.append(self._form.events(generation, delta))
        if delta.finish is not None:
            self._unfinished -= 1
        if not self.started.done():
            self.started.set_result(None)

    def flush(self) -> None:
        if self._transport is None or self.done.done():
            return
        if not self._failed:
            if self._merged and (not self._unfinished or not self._is_behind()):
                self._unmerge()
            if not self._unfinished:
                self._events += (self._form.tail(self._generations), DONE)
        data = self._take_events()
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self._failed or not self._unfinished:
            self.done.set_result(None)

    def fail(self, error: RequestError) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        elif not self._failed:
            self._failed = True
            self._events += (b"data: ", error.body(), b"\n\n", DONE)
            self.flush()

    def _is_behind(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > SOFT_LIMIT

    def _merge(self, generation: Generation, delta: TextDelta) -> None:
        self._merged.setdefault(generation, Answer()).add(delta)
        self._merged_size += len(delta.text)
        if self._merged_size > HARD_LIMIT:
            self.fail(RequestError("The client reads too slowly.", status=503))

    def _unmerge(self) -> None:
        for generation, answer in self._merged.items():
            self._events.append(self._form.events(generation, answer.as_delta(generation)))
        self._merged.clear()
        self._merged_size = 0

    def _take_events(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data
