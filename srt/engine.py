"""L1, main process: the engine inside a program of one's own: the same processes below, and no HTTP.

Owns the thread in which the house of `launch` runs; every call goes through that thread's event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import msgspec

import launch
from srt.config import ConfigError, ServerConfig, flag_name, parse_args
from srt.frontend.app import Frontend
from srt.frontend.decoding import decode
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation, error_of, join
from srt.frontend.native import GenerateFormat, Native
from srt.frontend.protocol import GenerateRequest
from srt.messages import ControlReply, TextDelta
from srt.observe.timeline import arrive

T = TypeVar("T")

Answer = dict[str, Any] | list[dict[str, Any]]

LAST_CALLS_SECONDS = 1.0
"""How long calls may take to hear that the house has ended."""
_OF_HTTP = (
    *("host", "port", "http_workers", "max_body_size", "cors_origins", "page_show_text", "metrics_names"),
    *("api_key", "admin_api_key", "ssl_certfile", "ssl_keyfile"),
)


class Engine:
    """Generates text without a server.

        with Engine("path/to/model", max_running_requests=64) as engine:
            engine.generate("The sea is", {"max_new_tokens": 16})["text"]

    Prompts, parameters and answers are those of the route /generate: one prompt gives a dict with `text`, `output_ids`
    and `meta_info`, a list of prompts a list. Threads may share an engine.
    """

    def __init__(self, model_path: str | None = None, **flags: Any) -> None:
        """The server's flags, named as in `ServerConfig`, but for those of HTTP.

        Returns when the model is ready. ConfigError, ModelError or StartError if it never will be.
        """
        config = parse_args(_arguments({"model_path": model_path, "log_level": "warning", **flags}))
        if config.node_rank:
            raise ConfigError("an Engine is node 0 of its group; start the other nodes with python -m launch")
        config, files = launch.prepare(config)
        self._owner = _Owner()
        self._loop = asyncio.SelectorEventLoop()
        self._taking = threading.RLock()  # a stream may be collected as garbage, and so closed, while it is held
        self._is_shut_down = False
        # It starts the child processes, and they end with the thread that started them.
        self._thread = threading.Thread(target=self._loop.run_forever, name="lockstep", daemon=True)
        self._thread.start()
        self._house = self._submit(launch.serve(config, files, self._owner))
        atexit.register(self.shutdown)
        try:
            wait([self._house, self._owner.opened], return_when=FIRST_COMPLETED)
            if self._house.done():
                self._house.result()
        except BaseException:
            self.shutdown()
            raise
        self._services = self._owner.opened.result().services
        self._native = Native(self._services)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | Iterator[dict[str, Any]]:
        """The answer or, with `stream`, an iterator over what is there so far: each dict has the text from its start.

        `fields` are the route's others, such as `return_logprob`. RequestError for what cannot be served. A stream that
        is closed ends its requests.
        """
        request = _request(prompt, sampling_params, input_ids, fields)
        return self._iterate(request) if stream else self._wait(self._answer(request))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | AsyncIterator[dict[str, Any]]:
        """As `generate`, from any event loop; a call that is cancelled ends its requests."""
        request = _request(prompt, sampling_params, input_ids, fields)
        if stream:
            return self._iterate_async(request)
        return await asyncio.wrap_future(self._submit(self._answer(request)))

    def flush_cache(self, timeout_s: float = 0.0) -> ControlReply:
        """Forgets every cached prefix, unless requests run and still do after `timeout_s`."""
        return self._wait(self._services.engines.flush_cache(timeout_s))

    def shutdown(self) -> None:
        """Ends all processes; answers on their way end here, as aborted. May be called again."""
        if self._is_shut_down:
            return
        atexit.unregister(self.shutdown)
        self._loop.call_soon_threadsafe(self._owner.stop)
        wait([self._house])
        with self._taking:
            self._is_shut_down = True
        asyncio.run_coroutine_threadsafe(_finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- in the engine's loop ---------------------------------------------------------------------------------------

    async def _answer(self, request: bytes) -> Answer:
        arrive()
        return await self._services.answer(*await self._native.accept(decode(request, GenerateRequest)))

    async def _events(self, request: bytes) -> AsyncIterator[dict[str, Any]]:
        arrive()
        prompts, form = await self._native.accept(decode(request, GenerateRequest))
        feed = _Feed()
        with self._services.manager.running(prompts, feed) as generations:
            unfinished = len(generations)
            while unfinished:
                for generation, delta in await feed.take():
                    unfinished -= delta.finish is not None
                    yield _event(form, generation, delta)

    # ---- in the caller's thread -------------------------------------------------------------------------------------

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._taking:
            if not self._is_shut_down:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RequestError("The engine was shut down.", status=503)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted

    def _iterate(self, request: bytes) -> Iterator[dict[str, Any]]:
        events = self._events(request)
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            with contextlib.suppress(RequestError):  # an engine that was shut down has closed it
                closed = self._submit(_close(events))
                if threading.current_thread() is not self._thread:  # in which it may be collected as garbage
                    closed.result()

    async def _iterate_async(self, request: bytes) -> AsyncIterator[dict[str, Any]]:
        events = self._events(request)
        try:
            while (event := await asyncio.wrap_future(self._submit(_next(events)))) is not None:
                yield event
        finally:
            with contextlib.suppress(RequestError):
                await asyncio.wrap_future(self._submit(_close(events)))


class _Owner:
    """The house's, as `launch.Owner` has it."""

    listeners: list[Any] = []  # noqa: RUF012 - there is none

    def __init__(self) -> None:
        self.opened: Future[Frontend] = Future()
        self._stop: Callable[[], None] | None = None
        self._stopped = False

    def on_stop(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self._stopped:
            stop()

    def ready(self, frontend: Frontend) -> str:
        self.opened.set_result(frontend)
        return "none, a program asks"

    def stop(self) -> None:
        self._stopped = True
        if self._stop is not None:
            self._stop()
        if self.opened.done():
            self.opened.result().services.manager.abort(None, "The engine was shut down.")


class _Feed:
    """The sink of a streamed answer; what has not been taken is joined."""

    def __init__(self) -> None:
        self._waiting: dict[Generation, list[TextDelta]] = {}
        self._error: RequestError | None = None
        self._something = asyncio.Event()

    def feed(self, generation: Generation, delta: TextDelta) -> None:
        if error := error_of(delta.finish):
            self.fail(error)
        else:
            self._waiting.setdefault(generation, []).append(delta)

    def flush(self) -> None:
        self._something.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._something.set()

    async def take(self) -> list[tuple[Generation, TextDelta]]:
        """All that has come since; RequestError if nothing more will."""
        await self._something.wait()
        self._something.clear()
        if self._error is not None:
            raise self._error
        waiting, self._waiting = self._waiting, {}
        return [(generation, join(deltas)) for generation, deltas in waiting.items()]


def _arguments(flags: dict[str, Any]) -> list[str]:
    """As on a command line, which checks them."""
    known = {spec.name for spec in dataclasses.fields(ServerConfig)}
    for name in flags:
        if name not in known:
            raise ConfigError(f"an Engine takes no {name}; its arguments are the server's flags, --tp-size as tp_size")
        if name in _OF_HTTP:
            raise ConfigError(f"an Engine takes no {name}: it speaks no HTTP")
    given = {flag_name(name): value for name, value in flags.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={value}" for name, value in given.items()]


def _request(prompt: Any, sampling_params: Any, input_ids: Any, fields: dict[str, Any]) -> bytes:
    """The body of /generate, which checks it."""
    body = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **fields}
    return msgspec.json.encode(body)


def _event(form: GenerateFormat, generation: Generation, delta: TextDelta) -> dict[str, Any]:
    return msgspec.json.decode(form.events(generation, delta).removeprefix(b"data: "))


async def _next(events: AsyncIterator[T]) -> T | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()


async def _finish() -> None:
    """Lets what threads still asked of a house that has ended come to its own end."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        _, stuck = await asyncio.wait(others, timeout=LAST_CALLS_SECONDS)
        for task in stuck:
            task.cancel()
    await asyncio.get_running_loop().shutdown_asyncgens()
