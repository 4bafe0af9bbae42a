"""How much the door takes: requests of one token, beside a bare aiohttp server, and streamed tokens.

    python -m examples.bench_front                           # one process speaks HTTP
    python -m examples.bench_front --http-workers 2

The engine is the real one, on a device that takes no time. Prints one JSON line. `requests_per_core` are requests to
/v1/completions, of a short text and for one token, over the CPU seconds of the processes that speak HTTP; `bare` is
the same of a server that only reads each body and sends an answer of the same bytes, to the same client. Both get as
many requests at once as it has connections, in turn, --rounds times: these are medians, and `ratio` is that of each
round's one over the other, with 95 % of it by resampling. `per_second` is by the clock, and so of all processes, client
and scheduler included, that share this machine's cores. `streamed_tokens_per_core` are of --streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop
from aiohttp import web

import launch
from examples.bench_overhead import streams
from examples.fake_device import FakeDevice, vocabulary
from examples.host import Server, cpu_seconds, end_servers_on_sigterm, free_port, interval, machine
from srt.process import ChildSpec, Ready
from srt.scheduler.process import Device, run
from srt.token_bytes import TokenBytes

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "Hello there", "max_tokens": 1}).encode()
CONNECTIONS = 128


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


def serve_bare(port: int, answer: bytes) -> None:
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


def measure(port: int, pid: int, count: int) -> tuple[float, float]:
    """Requests per second of the CPU, and of the clock."""
    before, start = front_seconds(pid), perf_counter()
    uvloop.run(send(port, count))
    seconds, used = perf_counter() - start, front_seconds(pid) - before
    return count / used, count / seconds


@contextlib.contextmanager
def bare_server(answer: bytes) -> Iterator[tuple[int, int]]:
    """Its port and its process."""
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
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def summary(rates: list[tuple[float, float]]) -> dict[str, float]:
    names = ("requests_per_core", "per_second")
    return {name: round(statistics.median(rate), 1) for name, rate in zip(names, zip(*rates, strict=True), strict=True)}


def scheduler(spec: ChildSpec, ready: Ready) -> None:
    """The door of the scheduler process."""

    def make_device(spec: ChildSpec, token_bytes: TokenBytes, ranks: object) -> Device:
        tokens = spec.config.max_running_requests * spec.config.context_length
        return Device(FakeDevice(vocabulary(token_bytes), step_seconds=0.0), tokens, {"summary": "none"})

    run(spec, ready, make_device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of HTTP, per request and per streamed token.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=6000, help="to each server in each round")
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
        answer = uvloop.run(send(port, args.requests))
        with bare_server(answer) as beside:
            pairs = [
                (measure(port, server.pid, args.requests), measure(*beside, args.requests)) for _ in range(args.rounds)
            ]
        before = front_seconds(server.pid)
        uvloop.run(streams(port, args.streams, args.streams, args.output_len, seed=1))
        tokens_per_core = args.streams * args.output_len / (front_seconds(server.pid) - before)
    ours, bare = zip(*pairs, strict=True)
    ratios = [one[0] / other[0] for one, other in pairs]
    report: dict[str, Any] = {
        "bench": "front",
        "http_workers": args.http_workers,
        **summary(ours),
        "bare": summary(bare),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_interval": interval(ratios),
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
            serve_bare(int(port), sys.stdin.buffer.read())
        case _:
            main()
