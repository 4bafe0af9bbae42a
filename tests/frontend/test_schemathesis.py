"""schemathesis, over the description of the routes, against the real frontend.

In a process of its own: pytest would read all of its modules anew, to rewrite their assertions.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from frontend_harness import Server


@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_all_is_as_described(tmp_path, examples):
    with Server(tmp_path) as server:
        server.engine.tokens_per_step = 100
        program = Path(__file__).with_name("use_schemathesis.py")
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [sys.executable, str(program), url, str(examples)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        described = server.get("/openapi.json")[1]["paths"]
        assert int(done.stdout) == sum(map(len, described.values())) - 1  # it leaves out the description itself
        assert server.request("GET", "/health")[0] == 200
        server.wait_for(lambda: not server.engine.live)
