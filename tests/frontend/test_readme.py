"""What README shows of HTTP works as it is printed, but for the port."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
PRINTED_PORT = ":30000"


def blocks(language, mark):
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [block for block in found if mark in block]


def run(server, *command):
    command = [part.replace(PRINTED_PORT, f":{server.port}") for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("block", blocks("bash", "curl "))
def test_curl(server, block):
    assert run(server, "bash", "-ec", block.replace("curl ", "curl --fail "))


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python", PRINTED_PORT))
def test_the_openai_client(server, block):
    assert run(server, sys.executable, "-c", block)


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python", "Engine("))
def test_the_engine(block):
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
