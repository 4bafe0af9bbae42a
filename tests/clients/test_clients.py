"""The clients that people use, unchanged, against a server with the default model.

Each has a program beside this file, which ends with 0 where all is as its user expects. Two are installed with the
tests; each of the others has an environment of its own, made once, in the user's cache. Where that cannot be done the
test is skipped and says why.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest
from server.server_harness import Server

from srt.model_files import cache_folder

INSTALL_SECONDS = 600
RUN_SECONDS = 300

INSTALLED = ("openai", "instructor")
# Client -> what it is installed as.
REQUIREMENTS = {
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
}


def interpreter(client: str) -> str:
    """Of the client's environment. pytest.skip where there is none and none can be made."""
    if client in INSTALLED:
        return sys.executable
    folder = cache_folder() / "clients" / client
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, *REQUIREMENTS[client]], capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
        if done.returncode:
            pytest.skip(f"{client} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    return str(python)


def run(client: str, *arguments: str) -> str:
    """What its program prints."""
    program = Path(__file__).with_name(f"use_{client}.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [interpreter(client), str(program), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    "client",
    [*INSTALLED, *(pytest.param(name, marks=pytest.mark.slow) for name in REQUIREMENTS)],
)
def test_a_client_gets_what_its_user_expects(client: str, server: Server) -> None:
    assert run(client, f"http://127.0.0.1:{server.port}").endswith("ok\n")  # some print more than they are asked to
    server.wait_idle()
