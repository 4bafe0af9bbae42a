"""L1, frontend: the listening socket and its connections: TLS, how long a client may take, what is no HTTP."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import _ErrInfo

from srt.frontend.answers import Answer
from srt.frontend.door import Door
from srt.frontend.errors import RequestError
from srt.frontend.metrics import Metrics
from srt.frontend.services import Services
from srt.observe.timeline import arrival

IDLE_SECONDS = 75.0
"""How long a connection may wait for a request's head, from its begin or from the last answer on. Proxies have 60."""
STOP_PATIENCE = 2.0  # seconds for answers that are being written when the server stops


def _is_ours(record: logging.LogRecord) -> bool:
    """False for a client's malformed HTTP, with whose tracebacks it could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_log = logging.getLogger(__name__)  # aiohttp's
_log.addFilter(_is_ours)


class Connection(web.RequestHandler):
    """`received` is when the first bytes of the request came that is being read or answered; 0 between two, and for one
    that came while the one before it was answered, or behind a body that was answered before it was there."""

    __slots__ = ("_is_behind_a_body", "_metrics", "received")

    def __init__(self, manager: web.Server, metrics: Metrics, **options: Any) -> None:
        super().__init__(manager, **options)
        self.received = 0.0
        self._is_behind_a_body = False
        self._metrics = metrics

    def data_received(self, data: bytes) -> None:
        if not self.received and not self._is_behind_a_body:
            self.received = time.monotonic()
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._end_body()

    def _end_body(self) -> None:
        """Where it goes on stands what is no HTTP: whoever reads it must not wait for more."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(web.RequestPayloadError())

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this for each piece of a body that is read, and parses nothing once more each time."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, start: float | None) -> None:
        """aiohttp calls this once the last bytes are with the socket, or the client has left."""
        self.received = 0.0
        self._is_behind_a_body = not request.content.is_eof()  # what comes next need not be the next request
        if written := arrival().written:
            self._metrics.handed(time.monotonic() - written)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> Answer:
        """Of what never became a request. The connection is closed behind it."""
        super().handle_error(request, status, exc, message)
        fault = "The request is not HTTP that this server reads." if status < 500 else "The server made a mistake."
        detail = [f"{line.rstrip(':. ')}." for line in (message or "").strip().splitlines()[:1]]
        error = RequestError(" ".join([fault, *detail]), status=status, code="malformed_http")
        response = Answer(error.body(), error.status)
        response.force_close()
        return response


class HttpServer:
    def __init__(self, door: Door, services: Services) -> None:
        self._door = door
        self._services = services
        self._runner: web.ServerRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()

        request = functools.partial(web.Request, loop=loop, client_max_size=self._services.max_body)

        def connection() -> Connection:
            options = {"access_log": None, "logger": _log, "keepalive_timeout": IDLE_SECONDS, "auto_decompress": False}
            return Connection(server, self._services.metrics, loop=loop, **options)

        server = web.Server(self._door.answer, request_factory=request, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=STOP_PATIENCE)
        await self._runner.setup()
        self._listener = await loop.create_server(connection, sock=sock, backlog=1024, ssl=tls)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
