"""Starts the real server as a user does, speaks HTTP to it, and sees that nothing is left when it has ended.

Each server runs in a session of its own, so that all its processes can be found whoever their parent is by now, and has
a directory of its own for temporary files, so that what it leaves there can be told from others' files.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0  # on a busy machine
REPLY_SECONDS = 120.0
PATIENCE = 60.0  # with what must come true at some time, on a machine that may stand still for seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class EventStream:
    """A streamed answer. Iterating gives the events' data as JSON, and ends at [DONE]."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.done = False  # [DONE] has come
        self._connection = connection
        self._response = response

    def __iter__(self) -> Iterator[Any]:
        while line := self._response.readline():
            if not line.startswith(b"data: "):
                assert line == b"\n", line
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                assert self._response.read() == b"\n", "something follows [DONE]"
                self.done = True
                return
            yield json.loads(data)

    def read(self) -> bytes:
        """The whole body, of an answer that is no stream."""
        return self._response.read()

    def close(self) -> None:
        """As a client that leaves: without reading what is still to come."""
        self._response.close()
        self._connection.close()


class Client:
    """Speaks HTTP to a port of this host."""

    port: int

    def request(self, method: str, path: str, body: Any = None, timeout: float = REPLY_SECONDS) -> Reply:
        connection, response = self._send(method, path, body, timeout)
        with contextlib.closing(connection):
            return Reply(response.status, response.read())

    def get(self, path: str, timeout: float = REPLY_SECONDS) -> Reply:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, body: Any = None, timeout: float = REPLY_SECONDS) -> Reply:
        return self.request("POST", path, {} if body is None else body, timeout)

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of an answer that must be a good one."""
        reply = self.post(path, body)
        assert reply.status == 200, reply.body
        return reply.json

    def generate(self, prompt: str | list[int], max_new_tokens: int, temperature: float = 0.0, **sampling: Any) -> Any:
        """/generate's answer, with `max_new_tokens` tokens unless a stop in `sampling` says otherwise."""
        params = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": True, **sampling}
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return self.ask("/generate", **source, sampling_params=params)

    @contextlib.contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[EventStream]:
        connection, response = self._send("POST", path, {**body, "stream": True}, REPLY_SECONDS)
        events = EventStream(connection, response)
        try:
            yield events
        finally:
            events.close()

    def _send(
        self, method: str, path: str, body: Any, timeout: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    # ---- what it says of itself -------------------------------------------------------------------------------------

    def info(self) -> Any:
        return self.get("/server_info").json

    def loads(self) -> Any:
        return self.get("/v1/loads").json["loads"][0]

    def is_idle(self) -> bool:
        """Nothing waits or runs, and every slot is free or cached."""
        loads, pool = self.loads(), self.info()["pool"]
        busy = loads["num_running_reqs"] + loads["num_waiting_reqs"] + pool["locked"]
        return busy == 0 and pool["free"] + pool["cached"] == pool["total"]

    def wait_idle(self, within: float = PATIENCE) -> None:
        wait_until(self.is_idle, within, lambda: f"not idle: {self.loads()}, {self.info()['pool']}")


class Server(Client):
    """`python -m launch` with these flags, started but not yet ready.

    `module` may stand in for launch, and `prefix` be a command that becomes it.
    """

    running: list[Server] = []

    def __init__(
        self,
        *flags: str,
        port: int | None = None,
        module: str = "launch",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.flags = flags
        self.port = port or free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="ls-"))
        self._scratch = self._folder / "tmp"
        self._scratch.mkdir()
        self._log = self._folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, "--port", str(self.port), *flags],
                cwd=ROOT,
                env={**os.environ, **(env or {}), "TMPDIR": str(self._scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(self)

    def __str__(self) -> str:
        return " ".join(("launch", *self.flags))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # ---- life -------------------------------------------------------------------------------------------------------

    def wait_ready(self) -> Server:
        """Connections wait until the model is there, so one question is enough."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"{self} ended with exit code {self.process.returncode}:\n{self.log}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/ready", timeout=START_SECONDS).status == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(f"{self} was not ready within {START_SECONDS:.0f} s:\n{self.log}")

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of this server, by pid. The dead that nobody has waited for are none."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state not in "ZX":
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found[int(entry.name)] = command.strip()
        return found

    def pid_of(self, title: str) -> int:
        return next(pid for pid, command in self.processes().items() if command.endswith(title))

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} had not ended after {timeout} s; running: {self.processes()}") from None

    def assert_nothing_left(self, within: float = 0.0) -> None:
        wait_until(lambda: not self.processes() and not self.leftovers(), within, self.remains)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "somebody still listens on the port"

    def leftovers(self) -> list[str]:
        return sorted(entry.name for entry in self._scratch.iterdir())

    def remains(self) -> str:
        return f"processes {self.processes()}, files {self.leftovers()}"

    def stop(self) -> None:
        """As SIGTERM should end it."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        assert self.wait() == 0, f"{self} ended with exit code {self.process.returncode}:\n{self.log}"
        self.assert_nothing_left()

    def dispose(self) -> None:
        """Whatever a test has left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.running.remove(self)
        shutil.rmtree(self._folder, ignore_errors=True)


class Stopwatch:
    """Counts ticks. One that comes late is still one, so the seconds in which a machine stands still do not count."""

    TICK = 0.02

    def __init__(self) -> None:
        self._ticks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stopwatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return self._ticks * self.TICK

    def _run(self) -> None:
        while not self._over.wait(self.TICK):
            self._ticks += 1


def wait_until(condition: Callable[[], bool], within: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(*flags: str, module: str = "launch", env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready, and that must end well unless the test has ended it."""
    with started(Server(*flags, module=module, env=env)) as server:
        yield server


@contextlib.contextmanager
def started(server: Server) -> Iterator[Server]:
    try:
        yield server.wait_ready()
        if server.process.returncode is None:
            server.stop()
    finally:
        server.dispose()


def refused_start(*flags: str, port: int | None = None) -> str:
    """What the server prints before it ends with exit code 1, leaving nothing behind."""
    server = Server(*flags, port=port)
    try:
        assert server.wait(START_SECONDS) == 1, server.log
        assert not server.processes(), server.remains()
        assert not server.leftovers(), server.remains()
        return server.log
    finally:
        server.dispose()


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    """All calls at the same time, each in a thread; their results in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]
