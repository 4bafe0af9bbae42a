"""After requests of all kinds, of which many were aborted or left by their client, nothing of them is left anywhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from server_harness import ROOT, Stopwatch, running

MOST_GROWTH_MB = 40  # of one process: buffers of allocators, no state of requests


@pytest.mark.parametrize("requests", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_stays_of_requests_that_are_gone(requests: int) -> None:
    """The pool is so small that requests wait, are retracted and evict each other's prefixes."""
    with running("--max-total-tokens", "1500", "--random-seed", "1") as server:
        command = [sys.executable, "-m", "examples.soak", "--base-url", f"http://127.0.0.1:{server.port}"]
        command += ["--requests", str(requests), "--pid", str(server.process.pid)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        print(result.stdout)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["idle"], report["left"]
        assert report["left"]["free"] + report["left"]["cached"] == report["left"]["total"]
        assert all(report["counts"][f"ended by {reason}"] > 0 for reason in ("abort", "length"))
        assert all(growth < MOST_GROWTH_MB for growth in report["growth_mb"].values()), report["growth_mb"]
        assert server.get("/flush_cache").status == 200
        pool = server.info()["pool"]
        assert pool["free"] == pool["total"]

        with Stopwatch() as watch:
            server.signal(signal.SIGTERM)  # it would wait for any request that the main process still knows
            assert server.wait() == 0
            assert watch.seconds < 5
        server.assert_nothing_left()
