"""What several small engines behind one door lose against a big one: how much of the prompts was still cached.

    python -m examples.bench_replicas
    python -m examples.bench_replicas --real

Prints one JSON line. The simulation has the real ledgers and the real choice between engines, and for a model its
speed: prompts one after the other, decoding beside them. Conversations go on where their last answer ended, some at a
time, with pauses; engines together hold as much as the big one. --real starts servers with the default model instead,
and lets the same chats run through each.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import random
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from examples import bench_serving
from examples.host import Server, end_servers_on_sigterm, free_port, machine
from radix import Ledger, Tenancy, check_ledger
from srt.cluster.balancer import CacheAware, RoundRobin, make_balancer

PREFILL_RATE, STEP_SECONDS = 38_000.0, 0.007
"""Prompt tokens a second and seconds for each token of an answer, about those of an 8B model on an H200."""
MOST_ROWS = 256
CONTEXT = 16_384
VOCABULARY = 50_000


@dataclasses.dataclass
class Conversation:
    """`turns`: what the user adds, and what the model will answer."""

    turns: list[tuple[bytes, bytes]]
    history: bytes = b""

    @classmethod
    def drawn(cls, rng: random.Random, common: bytes) -> Conversation:
        """Lengths as in vLLM's multi-turn benchmark: 12 to 18 turns that share 500 tokens and have 1,000 of their own
        in front, more or less, 120 to 160 tokens asked and 80 to 120 answered each time."""
        own = min(5000, int(rng.lognormvariate(6.5, 0.9)))
        turns = [(ids(rng, rng.randint(120, 160)), ids(rng, rng.randint(80, 120))) for _ in range(rng.randint(12, 18))]
        turns[0] = (common + ids(rng, own) + turns[0][0], turns[0][1])
        return cls(turns)


def ids(rng: random.Random, length: int) -> bytes:
    return array("i", [rng.randrange(VOCABULARY) for _ in range(length)]).tobytes()


@dataclasses.dataclass(eq=False)
class Request:
    prompt: bytes
    answer: bytes
    assignment: Any
    then: Callable[[float], None]
    tenancy: Tenancy | None = None


class Engine:
    """A ledger, and how long things take. `speed` times that of one device."""

    def __init__(self, clock: Clock, balancer: CacheAware | RoundRobin, pool_tokens: int, page_size: int, speed: float):
        self.ledger = Ledger(
            num_pages=pool_tokens // page_size, page_size=page_size, num_rows=MOST_ROWS, context_length=CONTEXT
        )
        self.prompt_tokens = self.cached_tokens = 0
        self._clock = clock
        self._balancer = balancer
        self._speed = speed
        self._waiting: list[Request] = []
        self._free_at = 0.0  # when all prompts before are computed

    def take(self, request: Request) -> None:
        self._waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            prompt, total = request.prompt, (len(request.prompt) + len(request.answer)) // 4
            tenancy = request.tenancy = self.ledger.open(b"", prompt[:-4], total)
            if tenancy is None:
                return
            del self._waiting[0]
            self.ledger.share(tenancy, prompt)
            length = len(prompt) // 4
            self.prompt_tokens += length
            self.cached_tokens += tenancy.cached_tokens
            start = max(self._free_at, self._clock.now)
            self._free_at = start + (length - tenancy.cached_tokens) / PREFILL_RATE / self._speed
            self._clock.at(self._free_at, lambda request=request: self._first_token(request))

    def _first_token(self, request: Request) -> None:
        self._balancer.heard(request.assignment, request.answer[:4])
        tokens = len(request.answer) // 4
        self._clock.at(self._clock.now + (tokens - 1) * STEP_SECONDS, lambda: self._last_token(request))

    def _last_token(self, request: Request) -> None:
        self._balancer.heard(request.assignment, request.answer[4:])
        self._balancer.ended(request.assignment)
        self.ledger.close(request.tenancy, (request.prompt + request.answer)[:-4])
        self._admit()
        request.then(self._clock.now)


class Clock:
    """Runs what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._serial), action))

    def run(self) -> None:
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


def simulate(
    method: str,
    num_engines: int,
    pool_tokens: int,
    *,
    seed: int,
    conversations: int = 96,
    concurrency: int = 24,
    pause: float = 1.0,
    page_size: int = 16,
) -> dict[str, Any]:
    """`num_engines` engines hold `pool_tokens` together; one is as fast as two, if it stands for two."""
    rng = random.Random(seed)
    common = ids(rng, 500)
    chats = [Conversation.drawn(rng, common) for _ in range(conversations)]
    pauses = random.Random(seed + 1)
    clock = Clock()
    pool = pool_tokens // num_engines
    balancer = make_balancer(method, [pool] * num_engines, page_size)
    engines = [Engine(clock, balancer, pool, page_size, 2.0 / num_engines) for _ in range(num_engines)]
    waiting = iter(chats)

    def next_chat() -> None:
        chat = next(waiting, None)
        if chat is not None:
            turn(chat, 0)

    def turn(chat: Conversation, number: int) -> None:
        if number == len(chat.turns):
            next_chat()
            return
        question, answer = chat.turns[number]
        prompt = chat.history + question
        chat.history = prompt + answer

        def later(now: float) -> None:
            clock.at(now + pauses.expovariate(1 / pause), lambda: turn(chat, number + 1))

        assignment = balancer.assign(b"", prompt)
        engines[assignment.engine].take(Request(prompt, answer, assignment, later))

    for _ in range(concurrency):
        next_chat()
    clock.run()
    for engine in engines:
        check_ledger(engine.ledger)
        assert engine.ledger.free_rows == MOST_ROWS
    prompts = [engine.prompt_tokens for engine in engines]
    return {
        "hit_rate": sum(engine.cached_tokens for engine in engines) / sum(prompts),
        "share_of_prompts": [round(tokens / sum(prompts), 3) for tokens in prompts],
        "seconds": round(clock.now, 1),
    }


def compare(run: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """`run(method, engines)` of one big engine and of two small ones, chosen between in both ways."""
    results = {
        "one": run("round_robin", 1),
        "cache_aware": run("cache_aware", 2),
        "round_robin": run("round_robin", 2),
    }
    best = results["one"]["hit_rate"]
    lost = {name: best - results[name]["hit_rate"] for name in ("cache_aware", "round_robin")}
    return {
        **results,
        "of_one": round(results["cache_aware"]["hit_rate"] / best, 4),
        "lost": {name: round(value, 4) for name, value in lost.items()},
    }


# ---- the real servers -----------------------------------------------------------------------------------------------


def serve_chats(method: str, num_engines: int, args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    command = [
        sys.executable, "-m", "launch", "--port", str(port), "--log-level", "warning", "--page-size", "16",
        "--dp-size", str(num_engines), "--load-balance-method", method,
        "--max-total-tokens", str(args.real_pool // num_engines),
    ]  # fmt: skip
    chats = [
        "--workload", "multi-turn", "--port", str(port), "--seed", str(args.seed), "--warmup", "0",
        "--conversations", "8", "--turns", "5", "--first-len", "200", "--question-len", "60", "--output-len", "12",
        "--concurrency", "4",
    ]  # fmt: skip
    log = Path(tempfile.mkdtemp(prefix="bench-replicas-")) / "server.log"
    with Server("lockstep", command, port, log=log) as server:
        server.wait_until_ready(300)
        report = uvloop.run(bench_serving.bench(bench_serving.parse_args(chats)))
    return {
        "hit_rate": report["cached_share"],
        "errors": report["errors"],
        "seconds": report["time_s"],
        "ttft_p50_ms": report["ttft_p50_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what is lost by several engines instead of a big one.")
    parser.add_argument("--pools", default="64000,128000,512000", help="tokens that all engines hold together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="start servers with the default model")
    parser.add_argument("--real-pool", type=int, default=6144)
    args = parser.parse_args()
    report: dict[str, Any] = {"bench": "replicas", "machine": machine()}
    if args.real:
        end_servers_on_sigterm()
        report["real"] = compare(lambda method, engines: serve_chats(method, engines, args))
    else:
        for pool in map(int, args.pools.split(",")):
            report[f"pool_{pool}"] = compare(
                lambda method, engines, pool=pool: simulate(method, engines, pool, seed=args.seed)
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
