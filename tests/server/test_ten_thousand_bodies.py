"""The same bodies against the real processes: none is lost, none grows, and no slot is kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from server_harness import ROOT, running
from test_leaks import MOST_GROWTH_MB


@pytest.mark.slow
def test_ten_thousand_hostile_bodies(small_model: str) -> None:
    flags = ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1")
    with running(*flags, "--context-length", "512", "--max-total-tokens", "8000") as server:
        before = server.processes()
        command = [sys.executable, "-m", "examples.fuzz", "--base-url", f"http://127.0.0.1:{server.port}"]
        command += ["--bodies", "10000", "--pid", str(server.process.pid)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        print(result.stdout)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["idle"], report["left"]
        assert all(growth < MOST_GROWTH_MB for growth in report["growth_mb"].values()), report["growth_mb"]
        assert server.processes() == before
        assert server.get("/flush_cache").status == 200
        pool = server.info()["pool"]
        assert pool["free"] == pool["total"]
