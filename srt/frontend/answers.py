"""L1, frontend: answers on their way to the socket: their heads, and bodies that are all there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, MutableMapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import HttpVersion, HttpVersion10, HttpVersion11, web

COMMON_HEADERS = web.RequestKey("common_headers", dict)
"""The headers that every answer to a request has, whatever else is in it."""

JSON = "application/json"
MEMBERS = 128  # of a long list, encoded in one step
PIECE = 256 * 1024  # bytes that are written at once

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Answer(msgspec.Struct, eq=False):
    """What aiohttp asks of a response, and no more. Its headers are written as they are."""

    body: bytes
    status: int = 200
    headers: MutableMapping[str, str] = {}
    content_type: str = JSON
    keep_alive: bool | None = None  # until it is known what the client wants
    request: web.BaseRequest | None = None

    def force_close(self) -> None:
        self.keep_alive = False

    async def prepare(self, request: web.BaseRequest) -> None:
        """aiohttp calls this, and then `write_eof`."""
        self.request = request
        if self.keep_alive is None:
            self.keep_alive = request.keep_alive

    async def write_eof(self) -> None:
        request, transport = self.request, self.request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError
        length = f"Content-Length: {len(self.body)}\r\n"
        begin = head(request.version, self.status, self.content_type, self.keep_alive, length, self.headers)
        body = b"" if request.method == "HEAD" else self.body
        transport.write(begin + body[:PIECE])
        await request.writer.drain()
        if len(body) > PIECE:
            await self._write_rest(transport, memoryview(body)[PIECE:])

    async def _write_rest(self, transport: asyncio.Transport, rest: memoryview) -> None:
        """No turn of the event loop copies or encrypts all of it."""
        for start in range(0, len(rest), PIECE):
            await asyncio.sleep(0)
            if transport.is_closing():
                raise ConnectionResetError
            transport.write(rest[start : start + PIECE])
            await self.request.writer.drain()


class Streamed(msgspec.Struct, eq=False):
    """What aiohttp asks of an answer that was written as it came, head and all."""

    keep_alive: bool
    status: int = 200
    headers: MutableMapping[str, str] = {}

    async def prepare(self, request: web.BaseRequest) -> None:
        pass

    async def write_eof(self) -> None:
        pass


Response = Answer | Streamed | web.StreamResponse


def json_response(value: Any) -> Answer:
    return Answer(msgspec.json.encode(value))


def long_json_response(value: Any) -> Answer:
    """For a thread."""
    return Answer(json_in_steps(value))


def json_in_steps(value: Any, depth: int = 5) -> bytes:
    """JSON whose every step is so short that other threads hardly wait for the interpreter, which the encoder holds.
    What is deeper than `depth` is one step."""
    if depth and isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        value = {name: field for name, field in fields.items() if field is not msgspec.UNSET}
    if depth and isinstance(value, dict):
        members = [b"%b:%b" % (msgspec.json.encode(k), json_in_steps(v, depth - 1)) for k, v in value.items()]
        return b"{%b}" % b",".join(members)
    if not isinstance(value, list):
        return msgspec.json.encode(value)
    if depth and value and isinstance(value[0], dict | msgspec.Struct):
        return b"[%b]" % b",".join([json_in_steps(one, depth - 1) for one in value])
    steps = range(0, len(value), MEMBERS)
    return b"[%b]" % b",".join([msgspec.json.encode(value[start : start + MEMBERS])[1:-1] for start in steps])


def text_response(text: str, content_type: str = "text/plain") -> Answer:
    return Answer(text.encode(), content_type=f"{content_type}; charset=utf-8")


def head(
    version: HttpVersion,
    status: int,
    content_type: str,
    keep_alive: bool,
    length: str,
    headers: Mapping[str, str],
) -> bytes:
    """Of an answer; `length` is the line that tells where its body ends, if one does."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{_begin(version, status, content_type, keep_alive, int(time.time()))}{length}{lines}\r\n".encode()


@functools.lru_cache(64)
def _begin(version: HttpVersion, status: int, content_type: str, keep_alive: bool, second: int) -> str:
    """What many answers of a second have in common."""
    phrase = _PHRASES.get(status, "")
    lines = (
        f"HTTP/{version.major}.{version.minor} {status} {phrase}\r\n"
        f"Content-Type: {content_type}\r\nDate: {formatdate(second, usegmt=True)}\r\n"
    )
    if keep_alive:
        return f"{lines}Connection: keep-alive\r\n" if version == HttpVersion10 else lines
    return f"{lines}Connection: close\r\n" if version == HttpVersion11 else lines
