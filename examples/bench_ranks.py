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
from radix import Ledger
from srt.board import Board, RankRecord
from srt.messages import ControlReply, NewRequest, SamplingParams, TokenBatch, pack_ids
from srt.parallel import Ranks
from srt.rendezvous import meet_on_host
from srt.scheduler.consensus import BoardConsensus
from srt.scheduler.control import Control, NoMaintenance
from srt.scheduler.intake import FollowerIntake, LeaderIntake
from srt.scheduler.observer import BoardObserver
from srt.scheduler.outlet import AgreedOutlet, SilentOutlet
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.policy import make_queue
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.scheduler.scheduler import Scheduler
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


class EncodingOutlet(SilentOutlet):
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def tokens(self, batch: TokenBatch) -> None:
        self._encoder.encode(batch)

    def reply(self, message: ControlReply) -> None:
        raise AssertionError("nobody asked for a flush")


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
    record = RankRecord(board, rank)
    ranks = Ranks(meet_on_host(endpoints.rendezvous, size), rank, size, "gloo")
    length = PROMPT + steps + WARM_UP + 8
    ledger = Ledger(num_pages=rows * length, page_size=1, num_rows=rows, context_length=length)
    planner = Planner(ledger, make_queue("fcfs", ledger), rows * PROMPT, rows)
    planner._reserve_ratio = 0.0
    output = Output([b"x"] * VOCAB, bytes(VOCAB))
    consensus = BoardConsensus(record, planner, output, ledger)
    outlet = SilentOutlet() if rank else AgreedOutlet(EncodingOutlet(), board)
    parts: dict[str, list[float]] = {"broadcast": [], "digest": [], "agreement": []}
    ranks.send = timed(ranks.send, parts["broadcast"])
    consensus.step = timed(consensus.step, parts["digest"])
    if rank == 0:
        outlet._compare = timed(outlet._compare, parts["agreement"])
    context = zmq.Context()
    intake = FollowerIntake(ranks) if rank else LeaderIntake(endpoints.leader, context, ranks)
    scheduler = Scheduler(
        ledger=ledger,
        planner=planner,
        output=output,
        executor=Device(),
        intake=intake,
        outlet=outlet,
        consensus=consensus,
        observer=BoardObserver(record, planner, output, ledger),
        grammars=None,
        control=Control(ledger, planner, outlet, NoMaintenance()),
        eos_token_ids=(),
        overlap=True,
    )
    next_inbox = intake.next

    def next_or_stop(wait: bool) -> Any:
        inbox = next_inbox(wait)
        scheduler.stopped = inbox.number == steps + WARM_UP
        return inbox

    intake.next = next_or_stop
    if rank == 0:
        sender = Sender(endpoints.leader, context)
        for rid in range(rows):
            sender.send(NewRequest(rid, pack_ids([rid] * PROMPT), SamplingParams(steps + WARM_UP, ignore_eos=True)))
    scheduler.run()
    assert len(planner.running) == rows
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
