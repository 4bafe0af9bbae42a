"""What the scheduler's loop costs per step beside the device: a device that answers at once, N requests that decode.

    python -m examples.bench_loop [--rows 1 64 256]

Prints one JSON line, in microseconds per step: of the whole loop, in several settings, and of its parts, as shares of a
step with a clock around each. A figure is that of the fastest 20 steps in a row, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import msgspec
import numpy as np

from examples.host import machine
from examples.simulated_engine import EncodingOutlet
from srt.board import Board, RankRecord
from srt.messages import Inbox, NewRequest, SamplingParams, pack_ids
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.scheduler.scheduler import Scheduler

PROMPT, STEPS, WINDOW, VOCAB = 512, 1000, 20, 1000
PARTS = ("planner", "output", "outlet", "consensus", "observer")


class InstantExecutor:
    def forward(self, batch: ScheduleBatch) -> ScheduleBatch:
        return batch

    def sample(self, launched: ScheduleBatch, masks: TokenMasks | None) -> None:
        pass

    def result(self, launched: ScheduleBatch) -> StepResult:
        return StepResult(np.full(launched.samples.sum(), 7, np.int32))


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

    def __init__(self, num_requests: int, stop: tuple[bytes, ...]) -> None:
        sampling = SamplingParams(4 * STEPS, ignore_eos=True, stop=stop)
        messages = [NewRequest(i, pack_ids([i] * PROMPT), sampling) for i in range(num_requests)]
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


def measure(
    rows: int, *, page_size: int = 1, stop: tuple[bytes, ...] = (), waiting: int = 0, parts: bool = False
) -> dict[str, float]:
    tokens = rows * (PROMPT + STEPS + 64)
    settings = Settings(
        num_pages=tokens // page_size,
        page_size=page_size,
        num_rows=rows,
        context_length=8192,
        cache_enabled=True,
        policy="fcfs",
        low_priority_first=False,
        token_budget=rows * PROMPT,
        overlap=True,
        eos_token_ids=(2,),
        token_bytes=(b"x",) * VOCAB,
        is_special=bytes(VOCAB),
    )
    intake = Arrivals(rows + waiting, stop)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        record = RankRecord(Board.create(f"{folder}/board", 1), 0)
        scheduler = intake.scheduler = assemble(
            settings, executor=InstantExecutor(), intake=intake, outlet=EncodingOutlet(), record=record
        )
        planner = scheduler._planner
        planner._reserve_ratio = 0.0
        for name in PARTS if parts else ():
            setattr(scheduler, f"_{name}", Timed(getattr(scheduler, f"_{name}"), name, seconds))
        scheduler.run()
    assert len(planner.running) == rows
    begins = np.array(intake.begins)
    loop = (begins[WINDOW + 10 :] - begins[10:-WINDOW]).min() / WINDOW * 1e6
    share = loop / ((begins[-1] - begins[0]) / STEPS * 1e6)
    result = {name: round(total / STEPS * 1e6 * share, 1) for name, total in sorted(seconds.items())}
    return {"loop": round(loop, 1), **result}


def figures(rows: int) -> dict[str, Any]:
    return {
        "us_per_step": min(measure(rows)["loop"] for _ in range(3)),
        "with_stop_string": measure(rows, stop=(b"stop",))["loop"],
        "page_size_16": measure(rows, page_size=16)["loop"],
        "with_1000_waiting": measure(rows, waiting=1000)["loop"],
        "parts": measure(rows, parts=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    result = {"bench": "loop", **{f"rows_{rows}": figures(rows) for rows in args.rows}, "machine": machine()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
