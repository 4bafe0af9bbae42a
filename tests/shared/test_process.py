"""What becomes of a child whose parent is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_abandoned_child_ends_and_tidies_up(tmp_path):
    """Several times, since the kernel may tell the child before the parent's pid is gone."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    parents, folders = [], []
    for number in range(4):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        command = [sys.executable, "-m", "shared.abandoned_child", str(folders[-1])]
        parents.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    for parent in parents:
        parent.stdout.readline()
    for parent in parents:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 30
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < deadline, "a child left without tidying up"
        time.sleep(0.01)
