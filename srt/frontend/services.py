"""L1, frontend: what the route handlers share, and how they read a body and write an answer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from srt.board import Board
from srt.config import ServerConfig
from srt.frontend.access import credential
from srt.frontend.answers import Answer, Response, json_response, long_json_response
from srt.frontend.compression import ENCODINGS, decompress
from srt.frontend.constraints import Constraints
from srt.frontend.decoding import decode
from srt.frontend.engines import Engines
from srt.frontend.errors import RequestError
from srt.frontend.generation import Collector, Generation, Prompt
from srt.frontend.house import House
from srt.frontend.logprobs import TokenTexts
from srt.frontend.metrics import Metrics
from srt.frontend.parsing.formats import Formats
from srt.frontend.request_traces import RequestTraces
from srt.frontend.sampling import OPENAI_DEFAULTS, SamplingDefaults
from srt.frontend.streaming import Format, Stream
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.frontend.words import Words
from srt.limits import Limits
from srt.model_config import ModelConfig
from srt.observe.timeline import arrival

SMALL_BODY = 64 * 1024  # bytes decoded on the spot
SMALL_ANSWER = 2048  # as Collector counts, written on the spot
BODY_SECONDS = 60.0  # for a body to come
MAX_RID = 256
ID = web.RequestKey("id", str)
"""What stands in the path of a request where its route's path has `{id}`."""
BYTES_PER_TOKEN = 64  # of a body, generous: ids and escapes take more than text

T = TypeVar("T")


@dataclass
class Weights:
    """Which are served."""

    path: str
    version: str = "default"


@dataclass(frozen=True)
class Services:
    config: ServerConfig
    model: ModelConfig
    model_name: str  # the name that clients use
    limits: Limits
    boards: Sequence[Board]  # of each engine
    infos: Sequence[dict[str, Any]]  # what each engine's rank 0 said when it was ready
    manager: TokenizerManager
    engines: Engines
    words: Words
    constraints: Constraints
    formats: Formats
    texts: TokenTexts
    metrics: Metrics
    weights: Weights
    traces: RequestTraces
    house: House
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS
    writers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="writers")
    )  # of long answers
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def max_body(self) -> int:
        return self.config.max_body_size or max(1 << 20, BYTES_PER_TOKEN * self.limits.context_length)

    def memory_usage(self, engine: int) -> dict[str, Any]:
        """In GB, but for what counts tokens: of the pool, and of host memory, if there is some, with the least that are
        copied back from there."""
        info = self.infos[engine]
        memory = info.get("memory", {})
        return {
            "weight_gb": memory.get("weights_bytes", 0) / 1e9,
            "kv_cache_gb": memory.get("kv_bytes", 0) / 1e9,
            "token_capacity": info["pool_tokens"],
            **{name: memory[name] for name in ("host_tokens", "restore_least") if name in memory},
        }

    def owner(self, request: web.Request) -> bytes:
        """Whose prefixes a request may share: everybody's, or those of who sends the same API key."""
        if self.config.cache_isolation == "none":
            return b""
        return hashlib.blake2b(credential(request), digest_size=16).digest()

    def check_model(self, name: str | None) -> None:
        """An absent or empty name means the served one."""
        if name and name not in (self.model_name, self.config.model_path):
            raise RequestError(
                f"The model `{name[:100]}` does not exist; this server has `{self.model_name}`.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    async def respond(self, request: web.Request, prompts: Sequence[Prompt], form: Format, stream: bool) -> Response:
        """Sends the prompts to the engine and its answers to the client, in one piece or as they come."""
        if stream:
            return await Stream(form, self.manager).respond(request, prompts)
        collector = Collector(prompts, self.manager.loop)
        with self.manager.running(prompts, collector) as generations:
            await collector.done
        if collector.size <= SMALL_ANSWER:
            response = json_response(_body(form, generations, collector))
        else:
            response = await self._write(_long_response, form, generations, collector)
        timeline = generations[-1].timeline
        response.headers["x-lockstep-timeline"] = msgspec.json.encode(timeline.stretches()).decode()
        response.headers["x-lockstep-total"] = f"{timeline.written - timeline.received:.6f}"
        return response

    async def answer(self, prompts: Sequence[Prompt], form: Format) -> Any:
        """The answer in one piece."""
        collector = Collector(prompts, self.manager.loop)
        with self.manager.running(prompts, collector) as generations:
            await collector.done
        if collector.size <= SMALL_ANSWER:
            return _body(form, generations, collector)
        return await self._write(_body, form, generations, collector)

    async def _write(self, write: Callable[..., T], *args: Any) -> T:
        """What takes long."""
        tally = self.manager.tally
        tally.take(1, None)  # or a server that stops would not wait for it
        try:
            return await asyncio.get_running_loop().run_in_executor(self.writers, write, *args)
        finally:
            tally.give(1)

    async def read(self, request: web.Request, kind: type, make: Callable[[Any], Any] | None = None) -> Any:
        """The body as a `kind`, or what `make` makes of that. RequestError for one that is too big, no JSON or of
        another shape."""
        raw = await self.read_bytes(request)
        if len(raw) <= SMALL_BODY:
            body = _made(raw, kind, make)
        else:
            body = await self.words.in_thread(_made, raw, kind, make)
        arrival().parsed = time.monotonic()
        return body

    async def read_bytes(self, request: web.Request) -> bytes:
        """A body that says it is too big, or encoded as none that is read here, is refused before it is read."""
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() or "identity"
        if encoding != "identity" and encoding not in ENCODINGS:
            sentence = "A body may come as it is, or in the `Content-Encoding` gzip or deflate."
            raise RequestError(sentence, status=415, code="unsupported_encoding")
        content = request.content
        # One that is all here need not be awaited.
        raw = content.read_nowait() if content.is_eof() else await self._rest_of_body(request)
        if encoding != "identity":
            raw = await self.words.in_thread(decompress, raw, encoding, self.max_body + 1)
        if len(raw) > self.max_body:
            raise too_big(self.max_body)
        return raw

    async def _rest_of_body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > self.max_body:
            raise too_big(self.max_body)
        expected = request.headers.get(hdrs.EXPECT, "") if request.version >= HttpVersion11 else ""
        if expected.lower() == "100-continue":  # it comes when the client is told that it may
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await asyncio.wait_for(request.read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(
                f"The body did not come within {BODY_SECONDS:.0f} seconds.", status=408, code="request_timeout"
            ) from None


def _made(raw: bytes, kind: type, make: Callable[[Any], Any] | None) -> Any:
    body = decode(raw, kind)
    return body if make is None else make(body)


def _body(form: Format, generations: Sequence[Generation], collector: Collector) -> Any:
    return form.body(generations, collector.answers)


def _long_response(form: Format, generations: Sequence[Generation], collector: Collector) -> Answer:
    return long_json_response(_body(form, generations, collector))


def too_big(limit: int) -> RequestError:
    return RequestError(f"The body must not exceed {limit} bytes.", status=413, code="request_too_large")


def new_id(prefix: str) -> str:
    """Nobody can guess it. In any thread."""
    while True:
        try:
            return prefix + _names.pop()
        except IndexError:
            block = os.urandom(16 * 256).hex()  # the system is asked for many at once, which takes as long as for one
            _names.extend(block[start : start + 32] for start in range(0, len(block), 32))


_names: list[str] = []  # of 32 hexadecimal digits each


def check_rid(rid: str | None) -> str | None:
    """An empty one means none."""
    if rid and len(rid) > MAX_RID:
        raise RequestError(f"`rid` takes at most {MAX_RID} characters.", param="rid")
    return rid or None


def check_priority(priority: int | None) -> int:
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise RequestError("`priority` must be between -2**31 and 2**31 - 1.", param="priority")
    return priority or 0
