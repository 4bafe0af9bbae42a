"""What the scheduler's loop costs per step beside the device: a device that answers at once, N requests that decode.

Prints one JSON line per number of rows: µs per step of the whole loop, and of its parts as shares of a step with a
clock around each. A figure is that of the fastest 20 steps in a row, so that other processes do not count.
    python tests/scheduler/bench_loop.py [rows ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import msgspec
import numpy as np

from radix import Ledger
from srt.board import Board, RankRecord
from srt.messages import Inbox, NewRequest, SamplingParams, TokenBatch, pack_ids
from srt.scheduler.consensus import BoardConsensus
from srt.scheduler.control import Control, NoMaintenance
from srt.scheduler.observer import BoardObserver
from srt.scheduler.outlet import SilentOutlet
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.policy import make_queue
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.scheduler.scheduler import Scheduler

PROMPT, STEPS, WINDOW, VOCAB = 512, 1000, 20, 1000


class InstantExecutor:
    def forward(self, batch: ScheduleBatch) -> ScheduleBatch:
        return batch

    def sample(self, launched: ScheduleBatch, masks: TokenMasks | None) -> None:
        pass

    def result(self, launched: ScheduleBatch) -> StepResult:
        return StepResult(np.full(launched.samples.sum(), 7, np.int32))


class EncodingOutlet:
    holds = False

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def tokens(self, batch: TokenBatch) -> None:
        self._encoder.encode(batch)

    def release(self, step: int) -> None:
        pass


class Timed:
    """Stands before an object and sums up the time its methods take, by name."""

    def __init__(self, target: Any, name: str, seconds: dict[str, float]) -> None:
        self._target, self._name, self._seconds = target, name, seconds

    def __getattr__(self, method: str) -> Any:
        function, key = getattr(self._target, method), f"{self._name}.{method}"
        if not callable(function):
            return function

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - begin
            return result

        return timed


class Arrivals:
    """All requests in the first inbox, then nothing more, and the end after STEPS steps."""

    def __init__(self, num_requests: int, stop: tuple[bytes, ...], waiting: int) -> None:
        sampling = SamplingParams(4 * STEPS, ignore_eos=True, stop=stop)
        messages = [NewRequest(i, pack_ids([i] * PROMPT), sampling) for i in range(num_requests + waiting)]
        self._items = tuple(map(msgspec.msgpack.encode, messages))
        self.number = 0
        self.begins: list[float] = []  # of each step
        self.scheduler: Scheduler

    def next(self, wait: bool) -> Inbox:
        self.number += 1
        self.begins.append(time.perf_counter())
        self.scheduler.stopped = self.number == STEPS
        items, self._items = self._items, ()
        return Inbox(self.number, time.monotonic(), items)


def measure(rows: int, page_size: int, stop: tuple[bytes, ...], waiting: int, parts: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        record = RankRecord(Board.create(f"{folder}/board", 1), 0)
        tokens = rows * (PROMPT + STEPS + 64)
        ledger = Ledger(num_pages=tokens // page_size, page_size=page_size, num_rows=rows, context_length=8192)
        planner = Planner(ledger, make_queue("fcfs", ledger), rows * PROMPT, rows)
        output = Output([b"x"] * VOCAB, bytes(VOCAB))
        seconds: dict[str, float] = {}
        intake = Arrivals(rows, stop, waiting)
        planner._reserve_ratio = 0.0

        def part(target: Any, name: str) -> Any:
            return Timed(target, name, seconds) if parts else target

        scheduler = intake.scheduler = Scheduler(
            ledger=ledger,
            planner=part(planner, "planner"),
            output=part(output, "output") if parts else output,
            executor=InstantExecutor(),
            intake=intake,
            outlet=part(EncodingOutlet(), "outlet"),
            consensus=part(BoardConsensus(record, planner, output, ledger), "consensus"),
            observer=part(BoardObserver(record, planner, output, ledger), "observer"),
            grammars=None,
            control=Control(ledger, planner, SilentOutlet(), NoMaintenance()),
            drafter=None,
            eos_token_ids=(2,),
            overlap=True,
        )
        scheduler.run()
        assert len(planner.running) == rows
        begins = np.array(intake.begins)
        loop = (begins[WINDOW + 10 :] - begins[10:-WINDOW]).min() / WINDOW * 1e6
        share = loop / ((begins[-1] - begins[0]) / STEPS * 1e6)
        result = {name: round(total / STEPS * 1e6 * share, 1) for name, total in sorted(seconds.items())}
        return {"loop": round(loop, 1), **result}


if __name__ == "__main__":
    for rows in map(int, sys.argv[1:] or ("1", "64", "256")):
        loop = min((measure(rows, 1, (), 0, False) for _ in range(3)), key=lambda m: m["loop"])["loop"]
        with_stop = measure(rows, 1, (b"stop",), 0, False)["loop"]
        paged = measure(rows, 16, (), 0, False)["loop"]
        queue = measure(rows, 1, (), 1000, False)["loop"]
        parts = measure(rows, 1, (), 0, True)
        print(
            json.dumps(
                {
                    "rows": rows,
                    "us_per_step": loop,
                    "with_stop_string": with_stop,
                    "page_size_16": paged,
                    "with_1000_waiting": queue,
                    "parts": parts,
                }
            )
        )
