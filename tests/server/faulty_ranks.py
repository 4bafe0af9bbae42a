"""In place of launch: the real processes around a fake model, of which one may go wrong in one way.

    FAULT=token:1 python -m faulty_ranks --tp-size 2

The fault happens in the rank behind the colon, in its step FAULT_STEP. With CHAOS=1 every rank's clock is hours away
from the others', and the last rank is slow in some steps. With DEVICE=model the model is a real one.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.fake_executor import FakeExecutor, FakeModel
from shared.python_path import python_path

import launch
from radix import eviction
from srt.board_relay import Mirror
from srt.messages import SamplingParams
from srt.parallel import Ranks
from srt.process import ChildSpec, Ready
from srt.scheduler import intake, outlet, process
from srt.scheduler.planner import Planner
from srt.scheduler.process import Device, _load_model, run
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult
from srt.token_bytes import TokenBytes

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": python_path(TESTS.parent, TESTS, TESTS / "server"), "PYTHONHASHSEED": "random"}
"""In which this module can be found by the processes that it starts."""
SMALL = ("--load-format", "dummy", "--context-length", "256", "--max-total-tokens", "300")
SMALL += ("--max-running-requests", "6")
"""Flags for a pool so small that requests evict each other's prefixes and are set back."""

VOCAB = 200
FAULT_STEP = 60
WRONG = "0" * 32
STEP_SECONDS = 0.002
MODEL = FakeModel(VOCAB)


def expected(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """What a request must get whose tokens end nothing."""
    prefix = 1
    for token in prompt:
        prefix = MODEL.extend(prefix, token)
    sampling, output = SamplingParams(count, seed=seed), []
    for _ in range(count):
        output.append(MODEL.next_token(prefix, sampling, (), len(output)))
        prefix = MODEL.extend(prefix, output[-1])
    return output


class Faulty:
    """The executor of the rank that goes wrong."""

    def __init__(self, inner: Any, act: Callable[[Faulty], None]) -> None:
        self.inner = inner
        self.steps = 0
        self.wrong_token = False
        self.sample = inner.sample
        self._act = act

    def forward(self, batch: ScheduleBatch) -> Any:
        self.steps += 1
        if self.steps == FAULT_STEP:
            self._act(self)
        return self.inner.forward(batch)

    def result(self, launched: Any) -> StepResult:
        result = self.inner.result(launched)
        if self.wrong_token:
            self.wrong_token = False
            tokens = result.tokens.copy()
            tokens[-1] ^= 1
            return StepResult(tokens)
        return result


def act_token(faulty: Faulty) -> None:
    faulty.wrong_token = True


def act_stop(faulty: Faulty) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def act_kill(faulty: Faulty) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def act_hang(faulty: Faulty) -> None:
    time.sleep(3600)


def act_exception(faulty: Faulty) -> None:
    raise ZeroDivisionError("planted")


def act_inbox(faulty: Faulty) -> None:
    """One inbox is lost."""
    receive = Ranks.receive
    Ranks.receive = lambda ranks: (receive(ranks), receive(ranks))[1]


def act_order(faulty: Faulty) -> None:
    """From here on decode rows stand in the order of a set of strings."""
    batch_of = Planner._batch

    def unordered(planner: Planner, requests: list, lengths: list, num_decode: int, *rest: Any) -> ScheduleBatch:
        named = {f"request {request.rid}": request for request in requests[:num_decode]}
        requests[:num_decode] = [named[name] for name in {*named}]
        return batch_of(planner, requests, lengths, num_decode, *rest)

    Planner._batch = unordered


def act_eviction(faulty: Faulty) -> None:
    """From here on a clock says which leaf is the oldest."""

    def first(order: eviction.EvictionOrder) -> Any:
        leaves = [node for node in order._nodes.values() if not node.children]
        return leaves[time.monotonic_ns() // 1000 % len(leaves)] if leaves else None

    eviction.EvictionOrder.first = first


def act_rows(faulty: Faulty) -> None:
    """One decode row is left out once, so that the ranks' next collective has unequal sizes."""
    batch_of = Planner._batch

    def without_one(planner: Planner, requests: list, lengths: list, num_decode: int, *rest: Any) -> ScheduleBatch:
        if num_decode < 2:
            return batch_of(planner, requests, lengths, num_decode, *rest)
        Planner._batch = batch_of
        del requests[0], lengths[0]
        return batch_of(planner, requests, lengths, num_decode - 1, *rest)

    Planner._batch = without_one


def act_nothing(faulty: Faulty) -> None:
    pass


ACTS = {name.removeprefix("act_"): act for name, act in list(globals().items()) if name.startswith("act_")}


class SkewedTime:
    """Stands for the module `time` in the scheduler."""

    sleep = staticmethod(time.sleep)

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def monotonic(self) -> float:
        return time.monotonic() + self._offset


def make_device(spec: ChildSpec, token_bytes: TokenBytes, ranks: Ranks | None) -> Device:
    config = spec.config
    name, _, rank = os.environ.get("FAULT", "nothing:0").partition(":")
    is_faulty = rank == str(spec.rank)
    chaos = "CHAOS" in os.environ
    if chaos:
        intake.time = outlet.time = SkewedTime(3600.0 * (spec.rank - 1) * 5)
    act = ACTS.get(name, act_nothing) if is_faulty else act_nothing
    if os.environ.get("DEVICE") == "model":
        device = _load_model(spec, token_bytes, ranks)
        return dataclasses.replace(device, executor=Faulty(device.executor, act))
    pool_tokens = config.max_total_tokens or config.max_running_requests * config.context_length
    if is_faulty and name == "pool":
        pool_tokens -= config.page_size
    executor = FakeExecutor(
        MODEL,
        num_rows=config.max_running_requests,
        context_length=config.context_length,
        num_pages=pool_tokens // config.page_size,
        page_size=config.page_size,
    )
    _slow_down(executor, chaos and spec.rank == config.tp_size - 1)
    return Device(Faulty(executor, act), pool_tokens, {"summary": f"{pool_tokens} fake tokens"})


def _slow_down(executor: FakeExecutor, at_random: bool) -> None:
    result = executor.result

    def slow(launched: Any) -> StepResult:
        time.sleep(random.choice((0, 0, 0, 0, 5)) * STEP_SECONDS if at_random else STEP_SECONDS)
        return result(launched)

    executor.result = slow


def main(spec: ChildSpec, ready: Ready) -> None:
    """The door of a scheduler process. The token of the group may be a wrong one, to the rank or to its parent."""
    fault = os.environ.get("FAULT")
    if fault == "rank_token":
        process.Mirror = lambda meeting, rank: Mirror(dataclasses.replace(meeting, token=WRONG), rank)
    wrong = {"token": WRONG} if fault == "link_token" else {}
    run(spec, lambda info: ready({**info, **wrong}), make_device)


if __name__ == "__main__":
    sys.exit(launch.main(scheduler_door="faulty_ranks:main"))
