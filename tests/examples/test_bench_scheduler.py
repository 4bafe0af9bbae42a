"""The benchmarks around a scheduler of their own run with it as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "figure"),
    [
        ("bench_loop --rows 1", ("rows_1", "parts", "planner.next_batch")),
        ("bench_ranks --rows 2 --steps 20", ("parts_us", "digest")),
    ],
)
def test_it_measures(command, figure):
    name, *flags = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    for key in figure:
        value = value[key]
    assert value > 0
