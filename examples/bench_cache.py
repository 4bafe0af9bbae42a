"""How much the prefix cache finds and what the policies make of it, around a device that computes nothing.

    python -m examples.bench_cache

Prints one JSON line. Scheduler and ledger are the real ones; the device has a clock of its own, on which a step takes
about what it takes an 8B model on an H200, so that only the costs depend on the machine.

- shared_prefix: 64 families of 16 prompts at once, 2,048 tokens in common, 128 of their own, 256 to generate.
- multi_turn: 256 chats of 5 turns, 512 tokens in and 64 out each, 128 at a time; whose turn it is is drawn at random.
- mixed: as shared_prefix, but 32 tokens to generate, and a pool for 32 requests.
- zero_hits: 2,048 prompts at once that share nothing, 512 tokens, 64 to generate.

`of_most` is the hit rate over that of a cache that forgets nothing. `third_...` is in a pool of a third of all tokens
there are; `third_of_oracle` compares with a cache of this size that knows what the same requests at the same times
will ask for, and gives up first what is wanted last. `host_...` has host memory for the rest behind it. `overtaken`
says how many that came later were served before one, `of_bound` the largest share of the promised bound that this was
for anyone. The costs of `zero_hits` are CPU time in the queue and in the prefix cache, with a CPU's settings;
`of_cpu_step` is what of them falls on a step, as a share of one that decodes 16 rows of the default model on two
cores.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from examples.host import machine
from examples.simulated_engine import CONTEXT, ROWS, Clients, Run, run
from examples.workloads import Conversation, random_prompts, shared_prefix
from srt.config import SCHEDULE_POLICIES
from srt.scheduler.policy import OVERTAKINGS
from srt.scheduler.scheduler import Scheduler

CPU_ROWS, CPU_BUDGET, CPU_STEP_SECONDS = 64, 1024, 0.018
BLOCK = 64  # tokens that the oracle keeps or gives up together


def random_turns(*, chats: int, turns: int, question_len: int, output_len: int) -> list[Conversation]:
    """Chats by ids, which go on with what the device has sampled."""
    questions = random_prompts(1, num_prompts=chats * turns, input_len=question_len, output_len=output_len)
    prompts = [question.prompts[0] for question in questions]
    return [
        Conversation("/v1/completions", prompts[first : first + turns], [output_len] * turns)
        for first in range(0, len(prompts), turns)
    ]


# ---- what is possible -----------------------------------------------------------------------------------------------


def oracle_hits(clients: Clients, pool_tokens: int) -> int:
    """Tokens found by a cache that knows what will be asked for, and when, and gives up first what is wanted last.

    It serves the same requests at the same times; what one that runs has cannot be given up. It keeps and gives up
    blocks of prompts and answers.
    """
    served = clients.served
    blocks = [list(_blocks(one.prompt + one.output)) for one in served]
    asked = [(len(one.prompt) - 1) // BLOCK for one in served]
    next_use = _next_uses(clients.events, blocks, asked)
    cached: dict[int, tuple[int, int]] = {}  # what makes a block a victim: the smallest goes first
    running: Counter[int] = Counter()
    victims: list[tuple[tuple[int, int], int]] = []
    hits = 0
    for at, (rid, opens) in enumerate(clients.events):
        if opens:
            found = (block in cached for block in blocks[rid][: asked[rid]])
            hits += BLOCK * sum(takewhile(bool, found))
            running.update(blocks[rid])
        for depth, block in enumerate(blocks[rid]):
            cached[block] = -next_use[at][depth], -depth
            if not opens:
                running[block] -= 1
                if not running[block]:
                    heapq.heappush(victims, (cached[block], block))
        while victims and len(cached) * BLOCK > pool_tokens:
            entry, block = heapq.heappop(victims)
            if cached.get(block) == entry and not running[block]:
                del cached[block]
    return hits


def _next_uses(events: Sequence[tuple[int, bool]], blocks: list[list[int]], asked: list[int]) -> list[list[int]]:
    """Of each event, for each block of its request, the next event that asks for it."""
    uses = []
    known: dict[int, int] = {}
    for at in range(len(events) - 1, -1, -1):
        rid, opens = events[at]
        uses.append([known.get(block, len(events)) for block in blocks[rid]])
        if opens:
            known.update(dict.fromkeys(blocks[rid][: asked[rid]], at))
    return uses[::-1]


def _blocks(tokens: list[int]) -> Iterator[int]:
    """A number for each block that stands for all tokens up to its end."""
    number = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        number = hash((number, *tokens[end - BLOCK : end]))
        yield number


# ---- figures --------------------------------------------------------------------------------------------------------


def shared_prefix_figures() -> dict[str, Any]:
    chats = shared_prefix(
        1, groups=64, prompts_per_group=16, system_len=2048, question_len=128, output_len=256, ordered=False
    )
    most = (1024 - 64) * 2048 / (1024 * (2048 + 128))
    working_set = 64 * 2048 + 1024 * (128 + 256)
    figures: dict[str, Any] = {"most": round(most, 4)}
    for policy in ("fcfs", "lpm"):
        roomy, tight = run(chats, policy, 2 * working_set, 1024), run(chats, policy, working_set // 3, 1024)
        figures[policy] = {
            "of_most": round(roomy.hit_rate / most, 4),
            "third_hit_rate": round(tight.hit_rate, 4),
            "third_of_oracle": round(tight.hits / oracle_hits(tight.clients, working_set // 3), 4),
            "third_seconds": round(tight.seconds, 1),
        }
    return figures


def multi_turn_figures() -> dict[str, Any]:
    chats, turns, question, answer = 256, 5, 512, 64
    workload = random_turns(chats=chats, turns=turns, question_len=question, output_len=answer)
    working_set = chats * turns * (question + answer)
    figures: dict[str, Any] = {}
    for policy in ("fcfs", "lpm"):
        roomy = run(workload, policy, working_set + ROWS * CONTEXT, 128)
        shares = []
        for turn in range(1, turns):
            most = turn * (question + answer) / (turn * (question + answer) + question)
            shares.append(round(roomy.hit_rate_of(turn) / most, 4))
        tight = run(workload, policy, working_set // 3, 128)
        figures[policy] = {
            "of_most_by_turn": shares,
            "third_hit_rate": round(tight.hit_rate, 4),
            "third_of_oracle": round(tight.hits / oracle_hits(tight.clients, working_set // 3), 4),
            "third_seconds": round(tight.seconds, 1),
        }
        tiered = run(workload, policy, working_set // 3, 128, host_tokens=working_set)
        figures[policy] |= {
            "host_hit_rate": round(tiered.hit_rate, 4),
            "host_of_most": round(tiered.hits / roomy.hits, 4),
            "host_seconds": round(tiered.seconds, 1),
            "roomy_seconds": round(roomy.seconds, 1),
        }
    return figures


def mixed_figures() -> dict[str, Any]:
    chats = shared_prefix(
        1, groups=64, prompts_per_group=16, system_len=2048, question_len=128, output_len=32, ordered=False
    )
    return compare_policies(SCHEDULE_POLICIES, lambda policy: run(chats, policy, 32 * (2048 + 128 + 32), len(chats)))


def compare_policies(policies: Sequence[str], of: Callable[[str], Run]) -> dict[str, Any]:
    """Of runs whose requests all come at once; fcfs and lpm are among the policies."""
    figures: dict[str, Any] = {}
    for policy in policies:
        done = of(policy)
        overtaken = overtakings([rid for rid, opens in done.clients.events if opens])
        figures[policy] = {
            "requests_per_s": round(len(done.served) / done.seconds, 2),
            "hit_rate": round(done.hit_rate, 4),
            "overtaken_p99": int(np.percentile(overtaken, 99)),
            "overtaken_most": max(overtaken),
            "of_bound": round(max(times / (OVERTAKINGS * (rid + 1)) for rid, times in enumerate(overtaken)), 3),
        }
    fcfs = figures["fcfs"]["requests_per_s"]
    figures["lpm_over_fcfs"] = round(figures["lpm"]["requests_per_s"] / fcfs, 2)
    return figures


def overtakings(order: Sequence[int]) -> list[int]:
    """By rid, how many that came later were served before."""
    counts = [0] * len(order)
    for place, rid in enumerate(order):
        counts[rid] = sum(other > rid for other in order[:place])
    return counts


def zero_hits_figures() -> dict[str, Any]:
    chats = random_prompts(1, num_prompts=2048, input_len=512, output_len=64)
    figures: dict[str, Any] = {}
    for policy in SCHEDULE_POLICIES:
        costs = Costs()

        def watch(scheduler: Scheduler, costs: Costs = costs) -> None:
            for name in ("add", "first", "admit"):
                costs.count(scheduler._planner.waiting, name, "queue")
            for name in ("match", "tokens_to_lock", "acquire", "insert", "release", "evict"):
                costs.count(scheduler._ledger.cache, name, "cache")
            costs.count(scheduler._ledger, "adopt", "cache")

        gc.disable()  # it would look through what the clients keep
        done = run(chats, policy, 100_000, len(chats), watch, rows=CPU_ROWS, token_budget=CPU_BUDGET)
        gc.enable()
        assert done.hit_rate < 0.001
        figures[policy] = {
            **{f"{name}_us_per_request": round(ns / len(chats) / 1000, 1) for name, ns in costs.spent.items()},
            "of_cpu_step": round(costs.spent.total() / 1e9 / done.device.steps / CPU_STEP_SECONDS, 5),
        }
    return figures


class Costs:
    """`spent`: CPU time in ns, by kind. A call within a call that counts is part of that one."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._counts = False

    def count(self, target: Any, name: str, kind: str) -> None:
        """Adds the time of each call, less what it costs to ask for it, which may be as much."""
        function = getattr(target, name)
        asking = min(_asking() for _ in range(100))

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._counts:
                return function(*args, **kwargs)
            self._counts = True
            begin = time.thread_time_ns()
            result = function(*args, **kwargs)
            self.spent[kind] += max(0, time.thread_time_ns() - begin - asking)
            self._counts = False
            return result

        setattr(target, name, timed)


def _asking() -> int:
    begin = time.thread_time_ns()
    return time.thread_time_ns() - begin


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    result = {
        "benchmark": "cache",
        **machine(),
        "shared_prefix": shared_prefix_figures(),
        "multi_turn": multi_turn_figures(),
        "mixed": mixed_figures(),
        "zero_hits": zero_hits_figures(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
