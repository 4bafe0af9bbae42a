"""L1, main process: the HTTP server. Owns the routes, the door (who may come in) and the form of every error."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from srt.board import Board
from srt.chat_template import ChatTemplate
from srt.config import ServerConfig
from srt.frontend.balancer import Balancer
from srt.frontend.constraints import Constraints
from srt.frontend.errors import RequestError
from srt.frontend.grammar_check import GrammarCheck
from srt.frontend.logprobs import TokenTexts
from srt.frontend.management import Management
from srt.frontend.metrics import Metrics
from srt.frontend.native import Native
from srt.frontend.openai.chat import Chat
from srt.frontend.openai.completions import Completions
from srt.frontend.openai.models import Models
from srt.frontend.parsing import formats
from srt.frontend.services import Services, too_big
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.frontend.words import Words
from srt.limits import Limits
from srt.model_config import ModelConfig
from srt.model_files import ModelFiles
from srt.tokenization import Tokenizer
from srt.transport import Endpoints

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")  # without the API key
STOP_PATIENCE = 2.0  # seconds for answers that are being written when the server stops

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def _is_ours(record: logging.LogRecord) -> bool:
    """False for a client's malformed HTTP, with whose tracebacks it could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_http_log = logging.getLogger(f"{__name__}.http")  # aiohttp's
_http_log.addFilter(_is_ours)


class Frontend:
    """A running HTTP server. Made by `serve`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._manager = services.manager
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        return self._services

    async def start(self, sock: socket.socket | None) -> None:
        """Without a socket there is no HTTP: requests come from this process."""
        self._manager.start()
        if sock is not None:
            await self._start_http(sock)
        self._ticker = asyncio.create_task(self._tick())

    async def _start_http(self, sock: socket.socket) -> None:
        self._runner = web.AppRunner(
            application(self._services),
            access_log=None,
            logger=_http_log,
            handler_cancellation=True,
            shutdown_timeout=STOP_PATIENCE,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=1024).start()

    def drain(self) -> None:
        """From now on new requests get 503; running ones go on."""
        self._manager.draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is on its way; False if some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._manager.idle(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def fail(self, reason: str) -> None:
        """The engine is gone: every open request ends with an error, /health is red. May be called again."""
        if self._manager.failure is None:
            self._manager.fail(reason)

    async def stop(self) -> None:
        """Closes the port and the pipes; requests still open are cut off."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        self._manager.close()
        self._services.words.close()
        self._services.constraints.close()

    async def _tick(self) -> None:
        while True:
            self._services.metrics.sample(time.monotonic())
            await asyncio.sleep(1.0)


async def serve(
    config: ServerConfig,
    files: ModelFiles,
    limits: Limits,
    endpoints: Sequence[Endpoints],
    boards: Sequence[Board],
    infos: Sequence[dict[str, Any]],
    balancer: Balancer,
    sock: socket.socket | None,
) -> Frontend:
    """Starts serving on `sock`, which is bound, or this process alone.

    `infos` is what each engine's rank 0 said when it was ready.
    """
    tokenizer, template = await asyncio.to_thread(_load_words, config, files)
    name = config.served_model_name or files.name
    arguments = (config, files.model_config, name, tokenizer, template, limits, endpoints, boards, infos, balancer)
    services = await asyncio.to_thread(make_services, *arguments, files.tokenizer_folder)
    frontend = Frontend(services)
    await frontend.start(sock)
    return frontend


def make_services(
    config: ServerConfig,
    model: ModelConfig,
    model_name: str,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    limits: Limits,
    endpoints: Sequence[Endpoints],
    boards: Sequence[Board],
    infos: Sequence[dict[str, Any]],
    balancer: Balancer,
    tokenizer_folder: Path | None = None,
) -> Services:
    metrics = Metrics(model_name, len(boards))
    return Services(
        config=config,
        model=model,
        model_name=model_name,
        limits=limits,
        boards=boards,
        infos=infos,
        manager=TokenizerManager(config, limits, endpoints, metrics, balancer),
        words=Words(tokenizer, template, model.vocab_size, model.eos_token_ids),
        constraints=Constraints(GrammarCheck(tokenizer.vocabulary(model.eos_token_ids), tokenizer_folder)),
        formats=formats.choose(config, template),
        texts=TokenTexts(tokenizer.token_bytes),
        metrics=metrics,
    )


def _load_words(config: ServerConfig, files: ModelFiles) -> tuple[Tokenizer, ChatTemplate | None]:
    override = None if config.chat_template is None else Path(config.chat_template)
    template = ChatTemplate.from_folder(files.tokenizer_folder, override)
    return Tokenizer.from_folder(files.tokenizer_folder), template


def application(services: Services) -> web.Application:
    app = web.Application(middlewares=[_door(services)], client_max_size=services.max_body)
    app.on_response_prepare.append(_add_request_id)
    chat, completions, models = Chat(services), Completions(services), Models(services)
    native, management = Native(services), Management(services)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", chat.create),
        ("POST", "/v1/completions", completions.create),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{id:.+}", models.get),
        ("POST PUT", "/generate", native.generate),
        ("GET", "/", management.root),
        ("GET HEAD", "/health", management.health),
        ("GET", "/health_generate", management.health_generate),
        ("GET HEAD", "/ready", management.ready),
        ("GET", "/model_info", management.model_info),
        ("GET", "/get_model_info", management.model_info),
        ("GET", "/server_info", management.server_info),
        ("GET", "/get_server_info", management.server_info),
        ("GET", "/v1/loads", management.loads),
        ("GET", "/get_load", management.get_load),
        ("GET", "/metrics", management.metrics),
        ("GET", "/version", management.version),
        ("GET POST", "/flush_cache", management.flush_cache),
        ("POST", "/abort_request", management.abort_request),
        ("POST", "/tokenize", management.tokenize),
        ("POST", "/v1/tokenize", management.tokenize),
        ("POST", "/detokenize", management.detokenize),
        ("POST", "/v1/detokenize", management.detokenize),
    ]
    for methods, path, handler in routes:
        for method in methods.split():
            app.router.add_route(method, path, handler)
    return app


def _door(services: Services) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    expected = [f"Bearer {key}".encode() for key in services.config.api_keys]

    @web.middleware
    async def door(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if expected and request.path not in OPEN_PATHS:
                given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
                if not any([hmac.compare_digest(given, one) for one in expected]):  # as long for each of them
                    raise RequestError("The API key is missing or wrong.", status=401, code="invalid_api_key")
            response = await handler(request)
        except RequestError as error:
            response = _error_response(error)
        except web.HTTPException as error:
            response = _error_response(_of_http(error, services), error.headers.get("Allow"))
        except web.RequestPayloadError:
            response = _error_response(RequestError("The body is not encoded as its headers say."))
        except ConnectionError:
            response = web.Response()  # nobody is left to read it
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = _error_response(RequestError("The server made a mistake; its log says which.", status=500))
        return response

    return door


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    given = request.headers.get("X-Request-ID", "")
    response.headers["X-Request-ID"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _of_http(error: web.HTTPException, services: Services) -> RequestError:
    if error.status == 413:
        return too_big(services.max_body)
    if error.status == 404:
        return RequestError("There is no such route.", status=404, code="route_not_found")
    if error.status == 405:
        return RequestError("This route does not take this method.", status=405, code="method_not_allowed")
    return RequestError(error.reason, status=error.status)


def _error_response(error: RequestError, allow: str | None = None) -> web.Response:
    headers = {"Allow": allow} if allow else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = "1"
    return web.Response(body=error.body(), status=error.status, content_type="application/json", headers=headers)
