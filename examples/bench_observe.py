"""What it costs to look: the same load on the real processes around a fake device, looked at and not.

    python -m examples.bench_observe                     # everything: page, metrics, traces, timelines, logs
    python -m examples.bench_observe --page              # the live page alone, with 1,000 nodes and 256 requests
    python -m examples.bench_observe --quick

Two servers run, one of which nobody looks at; one is loaded at a time, in pairs whose order alternates. `ratio` is
tokens per second looked at over those not looked at, the median of the pairs, with an interval of 95 %. Everything is:
the page and /metrics, each asked for once a second, metrics under all names, a timeline in each answer, two log lines
for each request, all logs as JSON, and a trace of each request, sent to a collector that reads it. All share the
machine's cores, so what the looking client and the collector use counts as cost too. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop

from examples.host import Server, cpu_seconds, end_servers_on_sigterm, free_port, interval, machine
from examples.load_client import LoadClient
from examples.workloads import random_prompts

INPUT_LEN, OUTPUT_LEN, FILL_LEN = 32, 256, 8
PERIOD = 1.0


class Collector(asyncio.Protocol):
    """Takes whatever is posted to it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if found and len(body) >= length:
            self._data = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


async def poll(port: int, path: str, answers: list[bytes]) -> None:
    """Keeps the last answer."""
    client = LoadClient("127.0.0.1", port, keep_alive=True)
    while True:
        status, body = await client.get(path)
        assert status == 200, body
        answers[:] = [body]
        await asyncio.sleep(PERIOD)


async def load(
    port: int, concurrency: int, count: int, seed: int, fields: dict[str, Any], output_len: int = OUTPUT_LEN
) -> float:
    """Tokens per second of `count` streams, so many at a time."""
    client = LoadClient("127.0.0.1", port, keep_alive=True)
    prompts = random_prompts(seed, num_prompts=count, input_len=INPUT_LEN, output_len=output_len)
    waiting = iter([(prompt.path, prompt.body(0, "fake") | fields) for prompt in prompts])
    began = perf_counter()

    async def work() -> None:
        for path, body in waiting:
            result = await client.stream(path, body)
            if result.error or result.completion_tokens != output_len:
                raise SystemExit(f"a stream failed: {result.error or f'{result.completion_tokens} tokens'}")

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return count * output_len / (perf_counter() - began)


async def looked_at(
    port: int, concurrency: int, count: int, seed: int, collector: int | None
) -> tuple[float, list[bytes]]:
    """The rate, and what the page was told last. Without a collector the page is all that is looked at."""
    page: list[bytes] = []
    tasks = [asyncio.create_task(poll(port, "/page/data", page))]
    fields = {}
    server = None
    if collector is not None:
        tasks.append(asyncio.create_task(poll(port, "/metrics", [])))
        server = await asyncio.get_running_loop().create_server(Collector, "127.0.0.1", collector)
        fields["return_timeline"] = True
    try:
        return await load(port, concurrency, count, seed, fields), page
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if server is not None:
            server.close()


def command(port: int, rows: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "examples.fake_device", "--port", str(port), "--served-model-name", "fake",
        "--max-running-requests", str(rows), "--context-length", "1024", "--chunked-prefill-size", "8192", *more,
    ]  # fmt: skip


def log_requests(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/configure_logging", json.dumps({"log_requests": True}).encode()
    )
    urllib.request.urlopen(request, timeout=60).close()


def used(server: Server) -> float:
    return sum(cpu_seconds(server.pid).values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what it costs to look at a running server.")
    parser.add_argument("--page", action="store_true", help="the page alone, at 256 requests")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=4, help="requests one after the other on each connection")
    parser.add_argument("--quick", action="store_true", help="two short pairs")
    args = parser.parse_args()
    end_servers_on_sigterm()
    concurrency = 256 if args.page else 64
    pairs, rounds = (2, 1) if args.quick else (args.pairs, args.rounds)
    plain, watched, collector = free_port(), free_port(), None if args.page else free_port()
    flags = ["--page-show-text"]
    if collector is not None:
        flags += ["--metrics-names", "lockstep,sglang,vllm", "--log-format", "json"]
        flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector}/v1/traces"]
    logs = Path(tempfile.mkdtemp(prefix="bench-observe-"))
    rates: dict[str, list[float]] = {"plain": [], "watched": []}
    cpu = {"plain": 0.0, "watched": 0.0}
    count, seen = concurrency * rounds, {}
    with (
        Server("plain", command(plain, concurrency), plain, log=logs / "plain.log") as one,
        Server("watched", command(watched, concurrency, *flags), watched, log=logs / "watched.log") as other,
    ):
        servers = {"plain": one, "watched": other}
        for server in servers.values():
            server.wait_until_ready(300)
            uvloop.run(load(server.port, concurrency, 4 * concurrency, 0, {}, FILL_LEN))  # gives it a tree
        if collector is not None:
            log_requests(watched)
        for pair in range(pairs):
            for name in ("plain", "watched") if pair % 2 else ("watched", "plain"):
                before = used(servers[name])
                if name == "plain":
                    rate = uvloop.run(load(plain, concurrency, count, pair + 1, {}))
                else:
                    rate, page = uvloop.run(looked_at(watched, concurrency, count, pair + 1, collector))
                    told = json.loads(page[0])
                    nodes = len(told["engines"][0]["tree"]["nodes"])
                    seen = {"nodes": nodes, "requests": len(told["requests"]), "page_bytes": len(page[0])}
                rates[name].append(rate)
                cpu[name] += used(servers[name]) - before
    ratios = [watched / plain for watched, plain in zip(rates["watched"], rates["plain"], strict=True)]
    tokens = pairs * count * OUTPUT_LEN
    report = {
        "bench": "observe",
        "looked_at": "page" if args.page else "everything",
        "concurrency": concurrency,
        "pairs": pairs,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_interval": interval(ratios) if pairs > 2 else None,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "out_tok_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "cpu_us_per_token": {name: round(seconds / tokens * 1e6, 2) for name, seconds in cpu.items()},
        **seen,
        "machine": machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
