"""How children end, what is said of it, and what a process says of itself."""

import array
import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from shared.python_path import python_path

from srt.config import ConfigError
from srt.process import DUMP, STOP, Child, make_folder

ROOT = Path(__file__).parents[2]


def test_an_abandoned_child_ends_and_tidies_up(tmp_path):
    """Several times, since the kernel may tell the child before the parent's pid is gone."""
    folders = [tmp_path / str(number) for number in range(4)]
    abandon("wait_for_the_end", folders)
    deadline = time.monotonic() + 30
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < deadline, "a child left without tidying up"
        time.sleep(0.01)


def test_an_abandoned_child_ends_where_no_handler_runs(tmp_path):
    abandon("wait_where_no_handler_runs", [tmp_path / "folder"])
    pid = int((tmp_path / "folder" / "pid").read_text())
    deadline = time.monotonic() + 30
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def abandon(door, folders):
    """Kills as many parents as there are folders, once each has a child behind this door."""
    env = os.environ | {"PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    parents = []
    for folder in folders:
        folder.mkdir()
        command = [sys.executable, "-m", "shared.abandoned_child", door, str(folder)]
        parents.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    for parent in parents:
        parent.stdout.readline()
    for parent in parents:
        parent.send_signal(signal.SIGKILL)
        parent.wait()


def lives(pid):
    """Whether it has not ended, whoever has yet to hear of that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_that_was_told_to_stop_has_an_obituary():
    async def end(number):
        script = f"import os; os.kill(os.getpid(), {int(number)})"
        process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", script)
        return await Child("child", process, -1).obituary()

    assert asyncio.run(end(STOP)).endswith(f"was killed by signal {int(STOP)}")
    assert asyncio.run(end(signal.SIGKILL)).endswith("was killed by SIGKILL")


def test_a_dump_does_no_harm_in_the_middle_of_a_write():
    script = (
        "import sys; from srt.process import on_dump; on_dump(lambda: 'all is well')\n"
        "sys.stderr.write('x' * 2**18); sys.stderr.flush()"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=env, stderr=subprocess.PIPE) as process:
        size, waiting = fcntl.fcntl(process.stderr, fcntl.F_GETPIPE_SZ), array.array("i", [0])
        while waiting[0] < size:
            time.sleep(0.01)
            fcntl.ioctl(process.stderr, termios.FIONREAD, waiting)
        process.send_signal(DUMP)
        said = process.stderr.read().decode()
    assert process.returncode == 0, said.replace("x", "")
    assert "all is well" in said
    assert "Current thread" in said


def test_paths_of_pipes_are_as_short_as_those_of_sockets_must_be(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "l" * 66)
    with pytest.raises(ConfigError, match="TMPDIR"):
        make_folder()
