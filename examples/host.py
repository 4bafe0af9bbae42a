"""What the examples share: servers as child processes, those that must be there, arguments, the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from srt.hardware import cuda_device_count

_TICK = os.sysconf("SC_CLK_TCK")


def need_server(base_url: str) -> None:
    """Ends this program, with what to do, where nobody listens."""
    url = urlsplit(base_url)
    try:
        socket.create_connection((url.hostname, url.port or {"https": 443}.get(url.scheme, 80)), timeout=10).close()
    except (OSError, ValueError) as error:
        sys.exit(f"no server at {base_url} ({error}); start one: python -m launch")


def device_name(name: str) -> str:
    """The `type` of an argument."""
    if name == "cuda" and not cuda_device_count():
        raise argparse.ArgumentTypeError("cuda needs an NVIDIA GPU and its driver; there is none, use --device cpu")
    return name


def json_lines(path: str) -> list[Any]:
    """The `type` of an argument: a file's lines."""
    try:
        with open(path, encoding="utf-8") as file:  # `str.splitlines` would cut strings at other breaks, too
            return [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"it has JSON objects, one a line: {error}") from None


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def interval(ratios: list[float]) -> list[float]:
    """95 % of the median, by resampling."""
    rnd = random.Random(0)
    medians = sorted(statistics.median(rnd.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 4), round(medians[-51], 4)]


def busy_seconds() -> float:
    """CPU seconds all processes of the machine have used since it started."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / _TICK


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds used by a process and by each of its living descendants, by their titles."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")[0].decode() or stat.parent.name
        except OSError:  # it just ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = (command, (int(fields[11]) + int(fields[12])) / _TICK)
    totals: dict[str, float] = {}
    for pid, (command, seconds) in used.items():
        ancestor = pid
        while ancestor != root and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == root:
            totals[command] = totals.get(command, 0.0) + seconds
    return totals


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def end_servers_on_sigterm() -> None:
    """Makes SIGTERM an exception in the main thread, so that `with Server` ends its group then too."""

    def leave(signum: int, frame: object) -> None:
        sys.exit(f"ended by signal {signum}")

    signal.signal(signal.SIGTERM, leave)


class Server:
    """A server in a process group of its own. `with` ends the whole group, whatever happens."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = list(command)
        self.port = port
        self.log = log
        self._env = dict(os.environ) | dict(env or {})

    def __enter__(self) -> Server:
        self._log_file = self.log.open("wb")
        self._process = subprocess.Popen(
            self.command, env=self._env, stdin=subprocess.DEVNULL, stdout=self._log_file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for signum, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._process.pid, signum)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and _group_lives(self._process):
                time.sleep(0.1)
        self._process.wait()
        self._log_file.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> float:
        """Seconds from the start until /health answers 200; RuntimeError with the log's end if it never does."""
        while time.monotonic() - self._started < timeout:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return time.monotonic() - self._started
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} is not ready: {' '.join(self.command)}\n{tail}")


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
