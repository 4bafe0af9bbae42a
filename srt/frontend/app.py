"""L1, every process that speaks HTTP: its server, put together of its parts. Owns when it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from srt.board import Board
from srt.chat_template import ChatTemplate
from srt.config import ServerConfig
from srt.frontend.balancer import Balancer
from srt.frontend.constraints import Constraints
from srt.frontend.door import Door
from srt.frontend.engines import Engines
from srt.frontend.errors import RequestError
from srt.frontend.forwarding import Forwarder
from srt.frontend.grammar_check import GrammarCheck
from srt.frontend.house import House
from srt.frontend.http_server import HttpServer
from srt.frontend.logprobs import TokenTexts
from srt.frontend.metrics import Metrics
from srt.frontend.parsing import formats
from srt.frontend.request_traces import RequestTraces
from srt.frontend.sampling import OPENAI_DEFAULTS, SamplingDefaults
from srt.frontend.services import Services, Weights
from srt.frontend.step_log import StepLog
from srt.frontend.tally import Tally
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.frontend.words import Words
from srt.limits import Limits
from srt.model_config import ModelConfig, ModelError
from srt.model_files import ModelFiles, read_optional_json
from srt.tls import tls_context
from srt.tokenization import Tokenizer
from srt.transport import Endpoints

log = logging.getLogger(__name__)

DRAIN_LOOK_SECONDS = 0.02
SWITCH_SECONDS = 0.001  # for which a thread may keep the interpreter from the event loop: less than a token takes
TRACES_PATIENCE = 2.0  # seconds for traces on their way when the server stops


class Frontend:
    """A running HTTP server. Made by `serve`."""

    def __init__(self, services: Services, process: int = 0) -> None:
        """The main process's is 0; an HTTP worker's has a number."""
        self._services = services
        self._name = f"http worker {process}" if process else "main"
        self._forwarder = Forwarder(services) if process else None
        self._manager = services.manager
        self._http: HttpServer | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        return self._services

    async def start(self, sock: socket.socket | None) -> None:
        """Without a socket there is no HTTP: requests come from this process."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._manager.start()
        if sock is not None:
            is_private = sock.family == socket.AF_UNIX
            self._http = HttpServer(Door(self._services, self._forwarder), self._services)
            await self._http.start(sock, None if is_private else tls_context(self._services.config))
        self._ticker = asyncio.create_task(self._tick())

    def drain(self) -> None:
        """From now on new requests get 503; running ones go on."""
        self._manager.tally.close()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is on its way; False if some still are after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self._manager.tally.total:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        return True

    async def fault(self) -> str:
        """Waits until there is a reason why the server cannot go on that nobody else knows, and gives it."""
        await self._services.engines.broken.wait()
        return self._manager.failure or ""

    def fail(self, reason: str) -> None:
        """The engine is gone: every open request ends with an error, /health is red. May be called again."""
        if self._manager.failure is None:
            self._manager.fail(reason)
        self._services.house.fail(reason)

    def cut(self) -> None:
        """Requests that are still on their way here end with an error."""
        self._manager.cut(RequestError("The server was stopped before this request was done.", status=503))

    def admit(self, workers: Sequence[str]) -> None:
        """HTTP workers, by their addresses, which are ready and get what concerns them from now on."""
        self._services.house.admit([self._manager.sender(address) for address in workers])

    async def stop(self) -> None:
        """Closes the port and the pipes; requests still open are cut off."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._http is not None:
            await self._http.stop()
        if self._forwarder is not None:
            await self._forwarder.close()
        self._manager.close()
        self._services.words.close()
        self._services.writers.shutdown(wait=False, cancel_futures=True)
        self._services.constraints.close()
        await asyncio.to_thread(self._services.traces.close, TRACES_PATIENCE)

    def summary(self) -> str:
        return f"{self._name}: {len(self._manager.live)} requests on their way"

    async def _tick(self) -> None:
        step_log = StepLog(self._services.boards, self._services.metrics)
        while True:
            now = time.monotonic()
            self._services.metrics.sample(now)
            if self._forwarder is None:  # the main process's log is about all
                with contextlib.suppress(RequestError):
                    await self._services.house.count()
                step_log.tick(now)
            await asyncio.sleep(1.0)


async def serve(
    config: ServerConfig,
    files: ModelFiles,
    endpoints: Sequence[Endpoints],
    boards: Sequence[Board],
    infos: Sequence[dict[str, Any]],
    balancer: Balancer,
    sock: socket.socket | None,
    process: int = 0,
) -> Frontend:
    """Starts serving on `sock`, which is bound, or this process alone.

    `infos` is what each engine's rank 0 said when it was ready.
    """
    limits = Limits(config.context_length, min(info["pool_tokens"] for info in infos), config.page_size)
    tokenizer, template = await asyncio.to_thread(_load_words, config, files)
    defaults = _sampling_defaults(config, files)
    name = config.served_model_name or files.name
    arguments = (config, files.model_config, name, tokenizer, template, limits, endpoints, boards, infos, balancer)
    services = await asyncio.to_thread(make_services, *arguments, files.tokenizer_folder, defaults, process)
    frontend = Frontend(services, process)
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
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
    process: int = 0,
) -> Services:
    tally = Tally() if config.frontends == 1 else Tally(endpoints[0].tally, process, config.frontends)
    traces = RequestTraces(config.otlp_traces_endpoint)
    metrics = Metrics(config.metrics_families, model_name, len(boards), limits.page_size)
    manager = TokenizerManager(config, limits, endpoints, metrics, balancer, traces, tally, process)
    return Services(
        config=config,
        model=model,
        model_name=model_name,
        limits=limits,
        boards=boards,
        infos=infos,
        manager=manager,
        engines=Engines(manager, balancer),
        words=Words(tokenizer, template, model.vocab_size, model.eos_token_ids),
        constraints=Constraints(GrammarCheck(tokenizer.vocabulary(model.eos_token_ids), tokenizer_folder)),
        formats=formats.choose(config, template),
        texts=TokenTexts(tokenizer.token_bytes),
        metrics=metrics,
        weights=Weights(config.model_path or model_name),
        sampling_defaults=sampling_defaults,
        traces=traces,
        house=House(manager, metrics),
    )


def _load_words(config: ServerConfig, files: ModelFiles) -> tuple[Tokenizer, ChatTemplate | None]:
    override = None if config.chat_template is None else Path(config.chat_template)
    template = ChatTemplate.from_folder(files.tokenizer_folder, override)
    return Tokenizer.from_folder(files.tokenizer_folder), template


def _sampling_defaults(config: ServerConfig, files: ModelFiles) -> SamplingDefaults:
    if config.sampling_defaults == "openai":
        return OPENAI_DEFAULTS
    try:
        defaults = SamplingDefaults.of_model(read_optional_json(files.folder / "generation_config.json"))
    except (RequestError, msgspec.ValidationError) as error:
        raise ModelError(
            f"{files.folder / 'generation_config.json'}: {error}; --sampling-defaults openai does without"
        ) from None
    if defaults != OPENAI_DEFAULTS:
        log.info("sampling by the model's generation_config.json where a request does not say: %s", defaults)
    return defaults
