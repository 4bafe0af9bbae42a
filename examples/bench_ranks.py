"""What it costs per step that ranks hear the same and prove that they decide alike.

    python -m examples.bench_ranks [--tp-size 2] [--rows 64] [--steps 2000]

Real schedulers, one process each, around a device that lasts 2 ms and computes nothing. Prints one JSON line: the
median of the leader's microseconds per step, and of its parts: sending the inbox, the digest with its record
on the board, and the wait until the other ranks' records are equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import zmq

from examples.host import machine
from examples.simulated_engine import EncodingOutlet
from srt.board import Board, RankRecord
from srt.messages import NewRequest, SamplingParams, pack_ids
from srt.parallel import Ranks
from srt.rendezvous import meet_on_host
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.intake import FollowerIntake, LeaderIntake
from srt.scheduler.outlet import AgreedOutlet, SilentOutlet
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.transport import Endpoints, Sender

PROMPT, VOCAB, STEP_SECONDS, WARM_UP = 128, 1000, 0.002, 100


class Device:
    """Every row's token is its position. Spins, as a host that waits for a GPU does."""

    def forward(self, batch: ScheduleBatch) -> ScheduleBatch:
        return batch

    def sample(self, launched: ScheduleBatch, masks: TokenMasks | None) -> None:
        pass

    def result(self, launched: ScheduleBatch) -> StepResult:
        end = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < end:
            pass
        return StepResult(launched.sampled_positions % VOCAB)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def run_rank(folder: str, rank: int, size: int, rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each part, of the steps in which all rows decode."""
    endpoints = Endpoints(folder)
    board = Board(endpoints.board, size)
    ranks = Ranks(meet_on_host(endpoints.rendezvous, size), rank, size, "gloo")
    context = zmq.Context()
    outlet = SilentOutlet() if rank else AgreedOutlet(EncodingOutlet(), board)
    intake = FollowerIntake(ranks) if rank else LeaderIntake(endpoints.leader, context, ranks)
    length = PROMPT + steps + WARM_UP + 8
    settings = Settings(
        num_pages=rows * length,
        page_size=1,
        num_rows=rows,
        context_length=length,
        cache_enabled=True,
        policy="fcfs",
        low_priority_first=False,
        token_budget=rows * PROMPT,
        overlap=True,
        eos_token_ids=(),
        token_bytes=(b"x",) * VOCAB,
        is_special=bytes(VOCAB),
    )
    record = RankRecord(board, rank)
    scheduler = assemble(settings, executor=Device(), intake=intake, outlet=outlet, record=record)
    scheduler._planner._reserve_ratio = 0.0
    parts: dict[str, list[float]] = {"broadcast": [], "digest": [], "agreement": []}
    ranks.send = timed(ranks.send, parts["broadcast"])
    scheduler._consensus.step = timed(scheduler._consensus.step, parts["digest"])
    if rank == 0:
        outlet._compare = timed(outlet._compare, parts["agreement"])
    next_inbox = intake.next

    def next_or_stop(wait: bool) -> Any:
        inbox = next_inbox(wait)
        scheduler.stopped = inbox.number == steps + WARM_UP
        return inbox

    intake.next = next_or_stop
    if rank == 0:
        sampling = SamplingParams(steps + WARM_UP, ignore_eos=True)
        burst = [msgspec.msgpack.encode(NewRequest(rid, pack_ids([rid] * PROMPT), sampling)) for rid in range(rows)]
        sender = Sender(endpoints.leader, context)
        sender.send(burst)
    scheduler.run()
    assert len(scheduler._planner.running) == rows
    ranks.close()
    context.destroy(linger=0)
    return {name: seconds[WARM_UP:] for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--follow", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        run_rank(args.follow[0], int(args.follow[1]), args.tp_size, args.rows, args.steps)
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        Board.create(Endpoints(folder).board, args.tp_size).close()
        command = [sys.executable, "-m", "examples.bench_ranks", *sys.argv[1:], "--follow", folder]
        followers = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.tp_size)]
        try:
            parts = run_rank(folder, 0, args.tp_size, args.rows, args.steps)
            assert [follower.wait(30) for follower in followers] == [0] * len(followers)
        finally:
            for follower in followers:
                follower.kill()
    totals = [sum(step) for step in zip(*parts.values(), strict=True)]
    print(
        json.dumps(
            {
                "tp_size": args.tp_size,
                "rows": args.rows,
                "steps": args.steps,
                "us_per_step": round(median(totals) * 1e6, 1),
                "p90_us": round(sorted(totals)[len(totals) * 9 // 10] * 1e6, 1),
                "parts_us": {name: round(median(seconds) * 1e6, 1) for name, seconds in parts.items()},
                **machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
