"""What the engine adds to the time of the device: the real processes around a device that only takes its time.

    python -m examples.bench_overhead                        # 2,048 tokens a stream at concurrency 1, 64 and 256
    python -m examples.bench_overhead --quick                # 256 tokens

Prints one JSON line. `ratio` is the streamed time per output token, (last - first) / (tokens - 1) of each stream, over
the device's time per step: the median over the streams. `steady_ratio` is the same over the time in which all streams
ran, so that neither prefills nor stragglers are in it. 1 is perfect: everything else was hidden behind the device.
Requests are raw token ids on /v1/completions. The client's own share is small but not nothing; `cpu_us_per_token` says
what each process used, the scheduler's including the spinning while it waits for the device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import uvloop

from examples.bench_serving import milliseconds
from examples.fake_device import STEP_SECONDS
from examples.host import Server, busy_seconds, cpu_seconds, end_servers_on_sigterm, free_port, machine
from examples.load_client import LoadClient, StreamResult
from examples.workloads import random_prompts

INPUT_LEN = 128


async def streams(port: int, concurrency: int, count: int, output_len: int, seed: int) -> list[StreamResult]:
    client = LoadClient("127.0.0.1", port, keep_alive=True)
    status, body = await client.get("/v1/models")
    assert status == 200, body
    model = json.loads(body)["data"][0]["id"]
    waiting = iter(random_prompts(seed, num_prompts=count, input_len=INPUT_LEN, output_len=output_len))
    results: list[StreamResult] = []

    async def work() -> None:
        for request in waiting:
            results.append(await client.stream(request.path, request.body(0, model)))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    for result in results:
        if result.error or result.completion_tokens != output_len:
            raise SystemExit(f"a stream failed: {result.error or f'{result.completion_tokens} tokens'}")
    return results


def steady_seconds_per_token(results: list[StreamResult]) -> float | None:
    """In the time between the last stream's first token and the first stream's last; None if there was none.

    Events that carry several tokens count as so many, on average over their stream.
    """
    begin, end = max(r.times[0] for r in results), min(r.times[-1] for r in results)
    paces = []
    for result in results:
        inside = [time for time in result.times if begin <= time <= end]
        if len(inside) > 1:
            per_event = (result.completion_tokens - 1) / (len(result.times) - 1)
            paces.append((inside[-1] - inside[0]) / (len(inside) - 1) / per_event)
    return statistics.median(paces) if paces else None


def measure(server: Server, concurrency: int, count: int, output_len: int, seed: int) -> dict[str, Any]:
    cpu_before, busy_before, own_before = cpu_seconds(server.pid), busy_seconds(), process_time()
    start = perf_counter()
    results = uvloop.run(streams(server.port, concurrency, count, output_len, seed))
    seconds = perf_counter() - start
    own = process_time() - own_before
    used = {name: after - cpu_before.get(name, 0.0) for name, after in cpu_seconds(server.pid).items()}
    others = (busy_seconds() - busy_before - own - sum(used.values())) / seconds
    tokens = count * output_len
    paces = [result.decode_time / (result.completion_tokens - 1) for result in results]
    # Streams that follow one another on one connection have no time in common.
    steady = steady_seconds_per_token(results) if count == concurrency else None
    return {
        "concurrency": concurrency,
        "streams": count,
        "ratio": round(statistics.median(paces) / STEP_SECONDS, 4),
        "ratio_min": round(min(paces) / STEP_SECONDS, 4),
        "ratio_max": round(max(paces) / STEP_SECONDS, 4),
        "steady_ratio": round(steady / STEP_SECONDS, 4) if steady else None,
        **milliseconds([result.ttft for result in results], "ttft"),
        **milliseconds([gap for result in results for gap in result.gaps], "itl"),
        "tokens_per_event": round(tokens / sum(len(result.times) for result in results), 3),
        "out_tok_s": round(tokens / seconds, 1),
        "cpu_us_per_token": {
            name.removeprefix("lockstep: "): round(value / tokens * 1e6, 2)
            for name, value in {**used, "client": own}.items()
        },
        "cores_of_others": round(others, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the engine's overhead over a fake device.")
    parser.add_argument("--concurrency", default="1,64,256", help="comma-separated")
    parser.add_argument("--output-len", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="256 tokens a stream")
    args = parser.parse_args()
    end_servers_on_sigterm()
    port = free_port()
    concurrencies = [int(number) for number in args.concurrency.split(",")]
    output_len = 256 if args.quick else args.output_len
    command = [
        sys.executable, "-m", "examples.fake_device", "--port", str(port),
        "--max-running-requests", str(max(concurrencies)), "--context-length", str(INPUT_LEN + output_len + 1),
        "--chunked-prefill-size", "8192", "--log-level", "warning",
    ]  # fmt: skip
    log = Path(tempfile.mkdtemp(prefix="bench-overhead-")) / "server.log"
    with Server("lockstep", command, port, log=log) as server:
        server.wait_until_ready(60)
        uvloop.run(streams(port, 2, 4, min(64, output_len), seed=0))
        runs = [measure(server, c, 3 if c == 1 else c, output_len, seed=c) for c in concurrencies]
    report = {
        "bench": "overhead",
        "step_ms": STEP_SECONDS * 1e3,
        "input_len": INPUT_LEN,
        "output_len": output_len,
        "runs": runs,
        "machine": machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
