"""The benchmark of what it costs to look runs, and those whom it looks at are served alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "requests"), [([], 64), (["--page"], 256)])
def test_the_benchmark_prints_one_line(flags: list[str], requests: int) -> None:
    command = [sys.executable, "-m", "examples.bench_observe", "--quick", *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["concurrency"] == requests
    assert len(report["ratios"]) == report["pairs"] == 2
    assert all(rate > 0 for rate in report["out_tok_s"].values())
    assert report["cpu_us_per_token"].keys() == {"plain", "watched"}
    assert 0 < report["timeline"]["share"] < 0.1
    assert report["nodes"] >= (1000 if flags else 128)
