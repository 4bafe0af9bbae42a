"""A streaming HTTP/1.1 client that costs little: server and client of a benchmark share the machine's cores.

It speaks to any server with OpenAI's streaming routes. While a stream runs it only notes when events arrive; what is in
them is looked at once the stream is over. Events end with an empty line, as all servers known to us write them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass
class StreamResult:
    """One request as its client saw it. Times in seconds of one monotonic clock."""

    start: float
    times: list[float] = field(default_factory=list)  # when the events that carry tokens came
    end: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""  # only if asked for
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def decode_time(self) -> float:
        """From the first token to the last: what completion_tokens - 1 tokens took."""
        return self.times[-1] - self.times[0]

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class _Answer(NamedTuple):
    raw: bytes  # head and body as they came
    times: list[float]  # when each event came


class _Stream(asyncio.Protocol):
    """One connection. The answer is over at its last chunk, at its Content-Length, or when the server hangs up."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.open = False

    def expect_answer(self, done: asyncio.Future[None]) -> None:
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.done = done
        self._half_line = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.open = True

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        self.parts.append(data)
        events = data.count(b"\n\n")
        if self._half_line and data[:1] == b"\n" and data[:2] != b"\n\n":
            events += 1
        self._half_line = data[-1:] == b"\n" and data[-2:] != b"\n\n"
        if events == 1:
            self.times.append(now)
        elif events:
            self.times += [now] * events
        tail = data if len(data) >= len(_LAST_CHUNK) else b"".join(self.parts[-len(_LAST_CHUNK) :])
        if (tail.endswith(_LAST_CHUNK) or (not events and self._has_content_length())) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if not self.done.done():
            self.done.set_result(None)

    def _has_content_length(self) -> bool:
        """Whether an answer with a Content-Length is complete: the errors, which are not streamed."""
        head, found, body = b"".join(self.parts).partition(b"\r\n\r\n")
        for line in head.split(b"\r\n") if found else ():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return len(body) >= int(value)
        return False


class LoadClient:
    """Requests to one server. A connection serves one request at a time."""

    def __init__(self, host: str, port: int, *, keep_alive: bool, api_key: str = "", timeout: float = 600.0) -> None:
        self._host, self._port, self._keep_alive, self._timeout = host, port, keep_alive, timeout
        self._headers = f"Host: {host}:{port}\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")
        self._idle: list[_Stream] = []

    async def stream(self, path: str, body: dict[str, Any], *, want_text: bool = False) -> StreamResult:
        """Never raises for what the server does: `error` says what went wrong."""
        request = self._request("POST", path, json.dumps(body, separators=(",", ":")).encode())
        result = StreamResult(perf_counter())
        try:
            answer = await asyncio.wait_for(self._exchange(request), self._timeout)
        except (OSError, asyncio.TimeoutError) as error:
            result.error = f"{type(error).__name__}: {error}"
            result.end = perf_counter()
            return result
        result.end = perf_counter()
        try:
            _read_answer(answer, result, want_text)
        except (ValueError, KeyError, IndexError) as error:
            result.error = f"unreadable answer: {type(error).__name__}: {error}"
        return result

    async def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of a plain request."""
        answer = await asyncio.wait_for(self._exchange(self._request(method, path, b"")), self._timeout)
        return _head_and_body(answer.raw)

    def close(self) -> None:
        for stream in self._idle:
            stream.transport.close()
        self._idle.clear()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        connection = "keep-alive" if self._keep_alive else "close"
        head = (
            f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n"
        )
        return head.encode() + body

    async def _exchange(self, request: bytes) -> _Answer:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        stream = self._idle.pop() if self._idle else _Stream()
        stream.expect_answer(done)
        if not stream.open:
            await loop.create_connection(lambda: stream, self._host, self._port)
        try:
            stream.transport.write(request)
            await done
        except asyncio.CancelledError:
            stream.transport.abort()
            raise
        answer = _Answer(b"".join(stream.parts), stream.times)  # before another request may have the connection
        if self._keep_alive and stream.open:
            self._idle.append(stream)
        else:
            stream.transport.close()
        return answer


def _head_and_body(raw: bytes) -> tuple[int, bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        raise ValueError("the server hung up")
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunk(body)
    return int(head.split(b" ", 2)[1]), body


def _dechunk(raw: bytes) -> bytes:
    parts = []
    at = 0
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        at = line_end + 2
        parts.append(raw[at : at + size])
        at += size + 2


def _read_answer(answer: _Answer, result: StreamResult, want_text: bool) -> None:
    status, body = _head_and_body(answer.raw)
    if status != 200:
        result.error = f"HTTP {status}: {body[:300].decode(errors='replace')}"
        return
    events = [event[5:].strip() for event in body.split(b"\n\n") if event.startswith(b"data:")]
    times = answer.times
    if len(times) != len(events):  # a chunk's edge between the two line ends: not a server we know
        raise ValueError(f"{len(events)} events, but {len(times)} were seen to arrive")
    if not events or events[-1] != b"[DONE]":
        result.error = f"the stream broke off after {len(events)} events: {events[-1][:300] if events else b''!r}"
        return
    # Servers frame the tokens with events that are none: a role before, a finish reason and the usage after.
    first = _first_token(events[:-1])
    last = len(events) - 1 - _first_token(events[-2::-1])
    result.times = times[first:last] or times[:1]
    for event in events[max(last - 1, 0) : -1]:
        fields = json.loads(event)
        _read_usage(fields.get("usage"), result)
        if "error" in fields:
            result.error = event[:300].decode(errors="replace")
    if want_text:
        result.text = "".join(_text(json.loads(event)) for event in events[:-1])


def _first_token(events: Sequence[bytes]) -> int:
    return next((i for i, event in enumerate(events) if _is_token(json.loads(event))), len(events))


def _is_token(event: dict[str, Any]) -> bool:
    """A token need not bring text: it may be half a character, or special."""
    if _text(event):
        return True
    choices = event.get("choices")
    return bool(choices) and choices[0].get("finish_reason") is None and "role" not in (choices[0].get("delta") or {})


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    if not choices:
        return ""
    return choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""


def _read_usage(usage: dict[str, Any] | None, result: StreamResult) -> None:
    if usage:
        result.prompt_tokens = usage["prompt_tokens"]
        result.completion_tokens = usage["completion_tokens"]
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
