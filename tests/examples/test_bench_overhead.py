"""The fake device keeps its time line, and the benchmark around it runs the real processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.fake_device import STEP_SECONDS, FakeDevice
from srt.scheduler.schedule_batch import ScheduleBatch

STEP = 0.2


def batch(step: int, starts: list[int]) -> ScheduleBatch:
    rows = len(starts)
    start, one = np.array(starts, np.int32), np.ones(rows, np.int32)
    return ScheduleBatch(
        step=step,
        opened=(),
        num_decode=rows,
        row=np.arange(rows, dtype=np.int32),
        start=start,
        length=one,
        first_logit=start,
        samples=np.array([int(i != 1) for i in range(rows)], np.int32),
        table_start=start,
        slots=start,
    )


class Clock:
    """Each look at it takes a hundredth of a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += STEP / 100
        return self.now


def test_steps_follow_one_another_and_start_no_earlier_than_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("examples.fake_device.perf_counter", clock)
    device = FakeDevice(np.arange(50, 60, dtype=np.int32), STEP)
    first, second = device.forward(batch(1, [4, 5])), device.forward(batch(2, [5, 6]))
    assert clock.now < 0.1 * STEP  # launching does not wait
    device.sample(first, None)
    device.result(first)
    assert STEP <= clock.now < 1.1 * STEP
    device.sample(second, None)
    device.result(second)
    assert 2 * STEP <= clock.now < 2.1 * STEP
    clock.now = 4 * STEP
    device.result(device.forward(batch(3, [6, 7])))
    assert 5 * STEP <= clock.now < 5.1 * STEP  # idle time is not made up for


def test_rows_that_sample_get_a_token_of_the_vocabulary() -> None:
    device = FakeDevice(np.arange(50, 60, dtype=np.int32), 0.0)
    tokens = device.result(device.forward(batch(1, [4, 5, 6]))).tokens
    assert tokens.dtype == np.int32
    assert len(tokens) == 2
    assert all(50 <= token < 60 for token in tokens.tolist())


def test_the_benchmark_prints_one_line() -> None:
    command = [sys.executable, "-m", "examples.bench_overhead", "--concurrency", "1,4", "--output-len", "40"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    one, four = report["runs"]
    # Nothing can stream faster than the device: one token a step to each stream.
    assert 0 < one["out_tok_s"] <= 1 / STEP_SECONDS
    assert 0 < four["out_tok_s"] <= 4 / STEP_SECONDS
    assert 0 < one["ratio_min"] <= one["ratio"] <= one["ratio_max"]
    assert four["streams"] == 4
    assert one["tokens_per_event"] >= 1
    assert {"main", "scheduler 0", "detokenizer", "client"} <= set(one["cpu_us_per_token"])


def test_a_benchmark_that_is_ended_leaves_no_server() -> None:
    code = (
        "import sys, time; from pathlib import Path; from examples.host import Server, end_servers_on_sigterm\n"
        "end_servers_on_sigterm()\n"
        "with Server('x', ['sleep', '60'], 0, log=Path('/dev/null')) as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as bench:
        pid = int(bench.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        bench.terminate()
        assert bench.wait(60) != 0
        assert not Path(f"/proc/{pid}").exists()
