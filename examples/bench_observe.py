"""What it costs to look: the same load on the real processes around a fake device, looked at and not.

    python -m examples.bench_observe                     # everything: page, metrics, traces, timelines, logs
    python -m examples.bench_observe --page              # the live page alone, with 1,000 nodes and 256 requests
    python -m examples.bench_observe --quick

Everything is: the page and /metrics, each asked for once a second, metrics under all names, a timeline in each answer,
two log lines for each request, all logs as JSON, and a trace of each request, sent to a collector that reads it. Two
servers run, one of which nobody looks at; for the page alone it is one server, since no flag makes a difference. Loads
come in pairs, one of them looked at, whose order alternates. `ratio` is tokens per second looked at over those not
looked at, the median of the pairs, with an interval of 95 %. All share the machine's cores, so what the looking client
and the collector use counts there. It does not in `cpu_ratio`, the same of tokens for a second of the server's CPU
time; but there is the scheduler's waiting for its device in it, which it does by spinning.

`timeline` is what a request's marks cost the frontend, from the first to their places in the histograms, and their
share of all that a request costs it while nobody looks. Prints one JSON line.
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
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any, NamedTuple

import uvloop

from examples.host import Server, cpu_seconds, end_servers_on_sigterm, free_port, interval, machine
from examples.load_client import LoadClient
from examples.workloads import random_prompts
from srt.frontend import sampling
from srt.frontend.generation import Generation, Prompt
from srt.frontend.metrics import Metrics
from srt.frontend.protocol import NativeSampling
from srt.messages import Finish, Started, TextBatch
from srt.observe import tracing
from srt.observe.timeline import Timeline, arrive

INPUT_LEN, OUTPUT_LEN, FILL_LEN = 32, 256, 8
PERIOD = 1.0
MAIN = "lockstep: main"


class Run(NamedTuple):
    rate: float  # tokens per second
    cpu: dict[str, float]  # microseconds for a token, by process
    page: list[bytes]  # what it was told last, if anybody looked

    @property
    def all_cpu(self) -> float:
        return sum(self.cpu.values())


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
    port: int, concurrency: int, num_streams: int, seed: int, fields: dict[str, Any], output_len: int = OUTPUT_LEN
) -> float:
    """Tokens per second of the streams, so many at a time."""
    client = LoadClient("127.0.0.1", port, keep_alive=True)
    prompts = random_prompts(seed, num_prompts=num_streams, input_len=INPUT_LEN, output_len=output_len)
    waiting = iter([(prompt.path, prompt.body(0, "fake") | fields) for prompt in prompts])
    began = perf_counter()

    async def work() -> None:
        for path, body in waiting:
            result = await client.stream(path, body)
            if result.error or result.completion_tokens != output_len:
                raise SystemExit(f"a stream failed: {result.error or f'{result.completion_tokens} tokens'}")

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return num_streams * output_len / (perf_counter() - began)


async def looked_at(
    port: int, concurrency: int, num_streams: int, seed: int, collector: int | None
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
        return await load(port, concurrency, num_streams, seed, fields), page
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


def marks_seconds(requests: int = 20_000) -> float:
    """CPU seconds that the marks of one of them take in the frontend."""
    metrics = Metrics(["lockstep"], "fake", 1)
    prompt = Prompt("", b"", sampling.from_native(NativeSampling(), vocab_size=1))
    generation: Any = Generation(0, "", 0, prompt, *[None] * 4, finish=Finish("length"))
    started, batch = Started(1.0, 2.0, 3.0), TextBatch(1, (), 4.0, 5.0, 6.0)
    began = process_time()
    for _ in range(requests):
        arrived = generation.arrived = arrive(monotonic())
        arrived.parsed = monotonic()
        arrived.rendered = monotonic()
        arrived.tokenized = monotonic()
        timeline = generation.timeline = Timeline.of(arrived)
        timeline.sent = monotonic()
        timeline.start(started)
        timeline.first_token = batch.computed
        timeline.end(batch, 7.0)
        metrics.written(generation, monotonic())
    return (process_time() - began) / requests


def mean_cpu(runs: Sequence[Run]) -> dict[str, float]:
    return {name: round(statistics.mean([run.cpu.get(name, 0.0) for run in runs]), 2) for name in runs[-1].cpu}


@contextlib.contextmanager
def started(name: str, concurrency: int, *flags: str) -> Iterator[Server]:
    """A server with a tree."""
    port, log = free_port(), Path(tempfile.mkdtemp(prefix="bench-observe-")) / f"{name}.log"
    with Server(name, command(port, concurrency, *flags), port, log=log) as server:
        server.wait_until_ready(300)
        uvloop.run(load(port, concurrency, 4 * concurrency, 0, {}, FILL_LEN))
        yield server


def measure(server: Server, concurrency: int, rounds: int, seed: int, is_watched: bool, collector: int | None) -> Run:
    arguments = server.port, concurrency, concurrency * rounds, seed
    before = cpu_seconds(server.pid)
    rate, page = uvloop.run(looked_at(*arguments, collector)) if is_watched else (uvloop.run(load(*arguments, {})), [])
    tokens = concurrency * rounds * OUTPUT_LEN
    used = cpu_seconds(server.pid).items()
    return Run(rate, {title: (seconds - before.get(title, 0.0)) / tokens * 1e6 for title, seconds in used}, page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what it costs to look at a running server.")
    parser.add_argument("--page", action="store_true", help="the page alone, at 256 requests")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=20, help="requests one after the other on each connection")
    parser.add_argument("--quick", action="store_true", help="two short pairs")
    args = parser.parse_args()
    end_servers_on_sigterm()
    concurrency = 256 if args.page else 64
    pairs, rounds = (2, 1) if args.quick else (args.pairs, args.rounds)
    collector = None if args.page else free_port()
    pause = 0.0 if args.page or args.quick else tracing.PERIOD
    flags = ["--page-show-text"]
    if collector is not None:
        flags += ["--metrics-names", "lockstep,sglang,vllm", "--log-format", "json"]
        flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector}/v1/traces"]
    runs: dict[str, list[Run]] = {"plain": [], "watched": []}
    with contextlib.ExitStack() as stack:
        watched = stack.enter_context(started("watched", concurrency, *flags))
        plain = watched if collector is None else stack.enter_context(started("plain", concurrency))
        if collector is not None:
            log_requests(watched.port)
        servers, seeds = {"plain": plain, "watched": watched}, count(1)
        for pair in range(pairs):
            for name in ("plain", "watched") if pair % 2 else ("watched", "plain"):
                is_watched = name == "watched"
                runs[name].append(measure(servers[name], concurrency, rounds, next(seeds), is_watched, collector))
                if is_watched:
                    sleep(pause)  # then the other run does not pay for the last spans of this one
    pair_ratios = {
        "ratio": [watched.rate / plain.rate for plain, watched in zip(*runs.values(), strict=True)],
        "cpu_ratio": [plain.all_cpu / watched.all_cpu for plain, watched in zip(*runs.values(), strict=True)],
    }
    told, marks = json.loads(runs["watched"][-1].page[0]), marks_seconds() * 1e6
    report = {
        "bench": "observe",
        "looked_at": "page" if args.page else "everything",
        "concurrency": concurrency,
        "pairs": pairs,
    }
    for name, ratios in pair_ratios.items():
        report[name] = round(statistics.median(ratios), 4)
        report[f"{name}_interval"] = interval(ratios) if pairs > 2 else None
    report |= {
        "ratios": [round(ratio, 3) for ratio in pair_ratios["ratio"]],
        "out_tok_s": {name: round(statistics.median([run.rate for run in of]), 1) for name, of in runs.items()},
        "cpu_us_per_token": {name: mean_cpu(of) for name, of in runs.items()},
        "timeline": {
            "us_per_request": round(marks, 2),
            "share": round(marks / (mean_cpu(runs["plain"])[MAIN] * OUTPUT_LEN), 5),
        },
        "nodes": len(told["engines"][0]["tree"]["nodes"]),
        "requests": len(told["requests"]),
        "machine": machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
