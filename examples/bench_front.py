"""How much the door takes: requests of one token, beside a bare aiohttp server, and streamed tokens.

    python -m examples.bench_front                           # one process speaks HTTP
    python -m examples.bench_front --http-workers 2

The engine is the real one, on a device that takes no time. Prints one JSON line. `requests_per_core` are requests to
/v1/completions, of a short text and for one token, over the CPU seconds of the processes that speak HTTP; `bare` is
the same of a server that only reads each body and sends an answer of the same bytes, in the same run by the same
client. `ratio` is the one over the other. `per_second` is by the clock, and so of all processes, client and
scheduler included, that share this machine's cores. `streamed_tokens_per_core` are of --streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop
from aiohttp import web

import launch
from examples.bench_overhead import streams
from examples.fake_device import FakeDevice, vocabulary
from examples.host import Server, cpu_seconds, end_servers_on_sigterm, free_port, machine
from srt.process import ChildSpec, Ready
from srt.scheduler.process import Device, run
from srt.token_bytes import TokenBytes

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "Hello there", "max_tokens": 1}).encode()
CONNECTIONS = 16


class Connection(asyncio.Protocol):
    """Sends the same request over and over; answers must have a Content-Length and come whole."""

    def __init__(self, left: list[int], done: asyncio.Future[None]) -> None:
        self._left = left  # shared by all connections: how many requests are still to be sent
        self._done = done
        self._data = b""
        self.answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            assert head.startswith(b"HTTP/1.1 200"), self._data
            self.answer, self._data = body, b""
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server hung up"))

    def _next(self) -> None:
        if self._left[0] > 0:
            self._left[0] -= 1
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
            self._transport.write(head.encode() + b"\r\n\r\n" + BODY)
        elif not self._done.done():
            self._done.set_result(None)


async def send(port: int, count: int) -> bytes:
    """Many requests over a few connections; the body of one answer."""
    loop, left = asyncio.get_running_loop(), [count]
    ended = [loop.create_future() for _ in range(CONNECTIONS)]
    made = [await loop.create_connection(lambda done=done: Connection(left, done), "127.0.0.1", port) for done in ended]
    await asyncio.gather(*ended)
    for transport, _ in made:
        transport.close()
    return made[0][1].answer


def bare(port: int, answer: bytes) -> None:
    """The server that does nothing."""

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post(PATH, handler)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def front_seconds(pid: int) -> float:
    """CPU seconds of the main process and the HTTP workers, or of a server of one process."""
    return sum(
        used for name, used in cpu_seconds(pid).items() if not name.startswith(("lockstep: sched", "lockstep: detok"))
    )


def measure(port: int, pid: int, count: int) -> tuple[dict[str, float], bytes]:
    uvloop.run(send(port, count // 4))
    before, start = front_seconds(pid), perf_counter()
    answer = uvloop.run(send(port, count))
    seconds, used = perf_counter() - start, front_seconds(pid) - before
    return {"requests_per_core": round(count / used, 1), "per_second": round(count / seconds, 1)}, answer


def measure_bare(answer: bytes, count: int) -> dict[str, float]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "examples.bench_front", "bare", str(port)], stdin=subprocess.PIPE)
    try:
        process.stdin.write(answer)
        process.stdin.close()
        deadline = perf_counter() + 60
        while True:
            try:
                uvloop.run(send(port, CONNECTIONS))
                break
            except OSError:
                assert perf_counter() < deadline, "the bare server does not start"
        return measure(port, process.pid, count)[0]
    finally:
        process.terminate()
        process.wait()


def scheduler(spec: ChildSpec, ready: Ready) -> None:
    """The door of the scheduler process."""

    def make_device(spec: ChildSpec, token_bytes: TokenBytes, ranks: object) -> Device:
        tokens = spec.config.max_running_requests * spec.config.context_length
        return Device(FakeDevice(vocabulary(token_bytes), step_seconds=0.0), tokens, {"summary": "none"})

    run(spec, ready, make_device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of HTTP, per request and per streamed token.")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--http-workers", type=int, default=1)
    args = parser.parse_args()
    end_servers_on_sigterm()
    port = free_port()
    command = [
        sys.executable, "-m", "examples.bench_front", "serve", "--port", str(port), "--log-level", "warning",
        "--max-running-requests", str(args.streams), "--context-length", str(args.output_len + 256),
        "--chunked-prefill-size", "8192", f"--http-workers={args.http_workers}",
    ]  # fmt: skip
    log = Path(tempfile.mkdtemp(prefix="bench-front-")) / "server.log"
    with Server("lockstep", command, port, log=log) as server:
        server.wait_until_ready(60)
        ours, answer = measure(port, server.pid, args.requests)
        before = front_seconds(server.pid)
        uvloop.run(streams(port, args.streams, args.streams, args.output_len, seed=1))
        tokens_per_core = args.streams * args.output_len / (front_seconds(server.pid) - before)
    beside = measure_bare(answer, args.requests)
    report: dict[str, Any] = {
        "bench": "front",
        "http_workers": args.http_workers,
        **ours,
        "bare": beside,
        "ratio": round(ours["requests_per_core"] / beside["requests_per_core"], 3),
        "streams": args.streams,
        "streamed_tokens_per_core": round(tokens_per_core),
        "machine": machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *flags]:
            sys.exit(launch.main(flags, scheduler_door="examples.bench_front:scheduler"))
        case ["bare", port]:
            bare(int(port), sys.stdin.buffer.read())
        case _:
            main()
