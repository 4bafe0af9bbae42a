"""Load client for any server with OpenAI's streaming routes: what its clients wait, and how much it gives them.

    python -m examples.bench_serving --port 30000 --case b
    python -m examples.bench_serving --workload shared-prefix --groups 8 --prompts-per-group 16 --concurrency 32

Prints one JSON line. Requests are greedy and ignore the end of text, so each gives exactly what was asked for.
TTFT is from before the connection to the first token's event; ITL is between the events of one stream, which may carry
more than one token; decode_tok_s is one stream's (tokens - 1) / time from its first token to its last; out_tok_s and
req_s are over the whole run. Without --seed each run draws its own prompts, so that a repeated run does not measure the
server's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import uvloop

from examples.host import machine, need_server
from examples.load_client import LoadClient, StreamResult
from examples.workloads import Conversation, multi_turn, random_prompts, shared_prefix

# Small enough for a model of 135M parameters on two cores.
CASES: dict[str, dict[str, Any]] = {
    "a": {"workload": "random", "num_prompts": 4, "concurrency": 1, "input_len": 128, "output_len": 128},
    "b": {"workload": "random", "num_prompts": 64, "concurrency": 16, "input_len": 128, "output_len": 64},
    "c": {
        "workload": "shared-prefix", "groups": 1, "prompts_per_group": 32, "concurrency": 8,
        "system_len": 1024, "question_len": 64, "output_len": 32,
    },
    "d": {
        "workload": "multi-turn", "conversations": 4, "turns": 5, "concurrency": 4,
        "first_len": 256, "question_len": 64, "output_len": 32,
    },
    "e": {"workload": "max-tokens-1", "num_prompts": 256, "concurrency": 32, "input_len": 16},
}  # fmt: skip


def conversations_of(args: argparse.Namespace, seed: int) -> list[Conversation]:
    if args.workload == "shared-prefix":
        return shared_prefix(
            seed, groups=args.groups, prompts_per_group=args.prompts_per_group, system_len=args.system_len,
            question_len=args.question_len, output_len=args.output_len, ordered=args.ordered,
        )  # fmt: skip
    if args.workload == "multi-turn":
        return multi_turn(
            seed, conversations=args.conversations, turns=args.turns, first_len=args.first_len,
            question_len=args.question_len, output_len=args.output_len,
        )  # fmt: skip
    return random_prompts(
        seed, num_prompts=args.num_prompts, input_len=args.input_len, output_len=args.output_len,
        range_ratio=args.range_ratio,
    )  # fmt: skip


async def drive(
    client: LoadClient, model: str, conversations: list[Conversation], concurrency: int
) -> list[list[StreamResult]]:
    """Results by turn. A conversation that fails goes no further."""
    by_turn: list[list[StreamResult]] = [[] for _ in range(max(len(c.prompts) for c in conversations))]
    waiting = iter(conversations)

    async def work() -> None:
        for conversation in waiting:
            for turn in range(len(conversation.prompts)):
                body = conversation.body(turn, model)
                result = await client.stream(conversation.path, body, want_text=conversation.is_chat)
                by_turn[turn].append(result)
                if result.error:
                    break
                conversation.hear(result.text)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return by_turn


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def milliseconds(values: Sequence[float], name: str) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_p{percent}_ms": round(percentile(values, percent) * 1e3, 3) for percent in (50, 99)}


def figures(by_turn: list[list[StreamResult]], seconds: float) -> dict[str, Any]:
    results = [result for turn in by_turn for result in turn]
    good = [result for result in results if not result.error]
    errors = [result.error for result in results if result.error]
    report: dict[str, Any] = {"requests": len(results), "errors": len(errors), "time_s": round(seconds, 3)}
    if errors:
        report["first_error"] = errors[0]
    if not good:
        return report
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.completion_tokens for result in good)
    decoding = [result for result in good if result.completion_tokens > 1 and result.decode_time > 0]
    report |= {
        "req_s": round(len(good) / seconds, 3),
        "out_tok_s": round(output_tokens / seconds, 2),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_share": round(sum(result.cached_tokens for result in good) / max(prompt_tokens, 1), 4),
        **milliseconds([result.ttft for result in good], "ttft"),
        **milliseconds([gap for result in good for gap in result.gaps], "itl"),
        **milliseconds([result.end - result.start for result in good], "latency"),
    }
    if decoding:
        rates = [(result.completion_tokens - 1) / result.decode_time for result in decoding]
        report["decode_tok_s"] = round(statistics.median(rates), 2)
    if len(by_turn) > 1:
        report["turns"] = [
            milliseconds([result.ttft for result in turn if not result.error], "ttft")
            | {"cached_tokens": sum(result.cached_tokens for result in turn)}
            for turn in by_turn
        ]
    return report


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    client = LoadClient(
        args.host, args.port, keep_alive=not args.connection_per_request, api_key=args.api_key, timeout=args.timeout
    )
    model, server_version = await describe_server(client, args.model)
    warmup = argparse.Namespace(**vars(args) | {"num_prompts": args.warmup, "workload": "random"})
    if args.warmup:
        await drive(client, model, conversations_of(warmup, args.seed + 2**62), args.warmup)
    conversations = conversations_of(args, args.seed)
    machine_before = machine()
    cpu_start = resource.getrusage(resource.RUSAGE_SELF)
    start = perf_counter()
    by_turn = await drive(client, model, conversations, args.concurrency)
    seconds = perf_counter() - start
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    client.close()
    client_cpu = cpu.ru_utime + cpu.ru_stime - cpu_start.ru_utime - cpu_start.ru_stime
    return {
        "bench": "serving",
        **figures(by_turn, seconds),
        "client_cpu_share": round(client_cpu / seconds, 4),
        "model": model,
        "server_version": server_version,
        "machine": machine_before | {"uvloop": uvloop.__version__},
        "args": {name: value for name, value in vars(args).items() if name != "api_key"},
    }


async def describe_server(client: LoadClient, model: str | None) -> tuple[str, str | None]:
    """The name to ask for, and what the server calls its version (/version, or the one in /server_info)."""
    if model is None:
        status, body = await client.get("/v1/models")
        if status != 200:
            raise SystemExit(f"/v1/models answered {status}: {body[:300].decode(errors='replace')}")
        model = json.loads(body)["data"][0]["id"]
    for path in ("/version", "/server_info"):
        status, body = await client.get(path)
        if status == 200:
            version = json.loads(body).get("version")
            if version:
                return model, version
    return model, None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures a server with OpenAI's streaming routes.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", help="as the server calls it; asked of the server if unset")
    parser.add_argument("--case", choices=sorted(CASES), help="one of the presets; other flags still override it")
    parser.add_argument(
        "--workload", choices=("random", "shared-prefix", "multi-turn", "max-tokens-1"), default="random"
    )
    parser.add_argument("--concurrency", type=int, default=16, help="requests (or conversations) at a time")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--range-ratio", type=float, default=1.0, help="lengths are uniform in [ratio * L, L]")
    parser.add_argument("--groups", type=int, default=64, help="different system prompts")
    parser.add_argument("--prompts-per-group", type=int, default=16)
    parser.add_argument("--system-len", type=int, default=2048)
    parser.add_argument(
        "--question-len", type=int, default=128, help="own tokens of a prompt, or words of a later turn"
    )
    parser.add_argument("--ordered", action="store_true", help="group after group instead of shuffled")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first-len", type=int, default=512, help="words of a conversation's first turn")
    parser.add_argument("--warmup", type=int, default=2, help="random requests sent at once before the measurement")
    parser.add_argument("--seed", type=int, help="of the prompts; drawn if unset")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument(
        "--connection-per-request", action="store_true", help="for servers that drop connections they said to keep"
    )
    case = parser.parse_known_args(argv)[0].case
    if case:
        parser.set_defaults(**CASES[case])
    args = parser.parse_args(argv)
    if args.workload == "max-tokens-1":
        args.output_len = 1
    if args.seed is None:
        args.seed = random.randrange(2**31)
    return args


def main() -> None:
    args = parse_args()
    host = f"[{args.host}]" if ":" in args.host else args.host
    need_server(f"http://{host}:{args.port}")
    report = uvloop.run(bench(args))
    print(json.dumps(report))
    if report["errors"]:
        sys.exit(f"{report['errors']} of {report['requests']} requests failed: {report['first_error']}")


if __name__ == "__main__":
    main()
