"""Shared: how one process of the house starts another, and how each ends.

A child is a fresh interpreter, `python -m srt.process <module:attr>`: the parent writes its `ChildSpec` to the
child's standard input, the child answers through a pipe, with what it has to say when it is ready or with the
sentence that explains why it never will be. A child ends when its parent tells it to and, through the kernel, when its
parent dies. multiprocessing would import the parent's main module again, pickle arguments and leave a tracker process
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from setproctitle import setproctitle

from srt.config import ConfigError, ServerConfig
from srt.model_config import ModelConfig, ModelError
from srt.observe.logs import configure_logging
from srt.transport import Endpoints, Meeting

_PR_SET_PDEATHSIG = 1

STOP = signal.SIGRTMIN + 1
"""Ends a child. Not SIGTERM or SIGINT: terminals and service managers send those to all processes at once, and a child
that followed them would take from the parent the requests that it lets finish."""

ORPHANED = signal.SIGRTMIN
"""The kernel says with it that the parent has died: maybe a moment before its pid is gone, so it cannot be STOP."""

DUMP = signal.SIGUSR1
"""Makes a process print the stacks of its threads, even while it waits where no handler of Python's runs; and, as soon
as one can, what it has to say of itself."""

STOP_SECONDS = 3.0
"""How long a child may take to end before it is killed."""
FAULT_STOP_SECONDS = 0.5
"""The same after a fault: a rank that waits for another one does not hear that it should end."""

LAST_WORDS_SECONDS = 0.3
"""How long processes may take to say what the death of another did to them, and to print where they are."""

LONGEST_TEMPORARY = 70
"""Bytes of a path; Linux gives that of a socket 107."""

T = TypeVar("T")

Ready = Callable[[dict[str, Any]], None]
"""Called by a door when it can serve, with what the parent should know (JSON types). A rank that is not on node 0 calls
it once before, when it has met the others, with their `Meeting`."""


@dataclass(frozen=True)
class HttpShare:
    """What an HTTP worker is told beside."""

    number: int  # from 1
    listener: int  # descriptor of its socket, on which it listens already
    model_name: str
    infos: list[dict[str, Any]]  # what each engine's rank 0 said when it was ready


@dataclass(frozen=True)
class ChildSpec:
    """All that a child is told. JSON on the way."""

    title: str  # "scheduler 0", "detokenizer"
    config: ServerConfig
    endpoints: Endpoints
    model: ModelConfig
    folder: str  # of config.json and, if they are safetensors, the weights
    tokenizer_folder: str  # of tokenizer.json
    weights: str  # "safetensors", "gguf" or "dummy"
    gguf_path: str | None  # where GGUF weights are
    rank: int = 0
    meeting: Meeting | None = None  # known at the start on node 0 of several
    http: HttpShare | None = None

    @property
    def local_rank(self) -> int:
        """The rank's place among those of its host, of all engines, and so its GPU."""
        per_engine = self.config.ranks_per_node
        return self.endpoints.dp_rank * per_engine + self.rank % per_engine

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> ChildSpec:
        return msgspec.json.decode(text, type=cls)


class StartError(Exception):
    """A child that will not serve, with its own explanation."""


class Child:
    """The parent's end of a child process."""

    def __init__(self, title: str, process: asyncio.subprocess.Process, ready_fd: int) -> None:
        self.title = title
        self._process = process
        self._ready_fd = ready_fd
        self._answers: asyncio.StreamReader | None = None
        self._pipe: asyncio.ReadTransport | None = None

    @classmethod
    async def start(cls, door: str, spec: ChildSpec) -> Child:
        """Must run in a thread that outlives the child: for the kernel its parent dies with the thread that forked."""
        read_fd, write_fd = os.pipe()
        inherited = (write_fd,) if spec.http is None else (write_fd, spec.http.listener)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "srt.process", door, str(write_fd), str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, pass_fds=inherited,
        )  # fmt: skip
        os.close(write_fd)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(spec.to_json())
            await process.stdin.drain()
            process.stdin.close()
        return cls(spec.title, process, read_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> dict[str, Any]:
        """What the child said when it was ready; StartError if it failed or died."""
        if self._answers is None:
            reader = self._answers = asyncio.StreamReader()
            pipe = os.fdopen(self._ready_fd, "rb")
            loop = asyncio.get_running_loop()
            self._pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        line = await self._answers.readline()
        if not line:
            raise StartError(await self.obituary())
        answer = json.loads(line)
        if "error" in answer:
            raise StartError(answer["error"])
        return answer["ready"]

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def was_killed(self) -> bool:
        """It has ended, by a signal."""
        return self.has_ended and self._process.returncode < 0

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(DUMP)

    async def obituary(self) -> str:
        """Waits for the end and tells how it came."""
        code = await self._process.wait()
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:  # most of the real-time signals have none, and STOP is one of them
                name = f"signal {-code}"
            return f"{self.title} (pid {self.pid}) was killed by {name}"
        return f"{self.title} (pid {self.pid}) ended with exit code {code}"

    async def stop(self, patience: float) -> None:
        """STOP, and SIGKILL after `patience` seconds."""
        if self._pipe is not None:
            self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STOP)
        try:
            await asyncio.wait_for(self._process.wait(), patience)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def first_death(children: Sequence[Child]) -> str:
    """How the first child that ends came to its end."""
    return await first_of(*(child.obituary() for child in children))


async def first_of(*coroutines: Awaitable[T]) -> T:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stop: asyncio.Event, coroutine: Awaitable[T]) -> T | None:
    """The coroutine's result, or None if `stop` is set first."""

    async def stopped() -> None:
        await stop.wait()

    return await first_of(coroutine, stopped())


class Stopped(BaseException):
    """Raised in a child's main thread by STOP and ORPHANED; not an Exception, so that nothing swallows it."""


def end_at_once_when_stopped() -> None:
    """For a child with nothing to tidy up that waits where no handler of Python's runs."""
    _on_end(signal.SIG_DFL)


def end_at_once_when_orphaned() -> None:
    """For a child that waits there too, for others that end sooner, and that nobody would be left to kill."""
    signal.signal(ORPHANED, signal.SIG_DFL)


def settle() -> None:
    """Once all is loaded, in a process that takes requests: what is there stays, and a request leaves no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def make_folder() -> str:
    """For the pipes of a house. ConfigError if their paths would be longer than those of sockets may be."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY:
        raise ConfigError(f"TMPDIR may be {LONGEST_TEMPORARY} bytes long, for there are sockets in it; try TMPDIR=/tmp")
    return tempfile.mkdtemp(prefix="lockstep-")


def set_title(title: str) -> None:
    setproctitle(f"lockstep: {title}")


def on_dump(summary: Callable[[], str] = str) -> None:
    """From now on DUMP prints stacks, and what `summary` says if it says anything. For a process's main thread."""

    def handler(signum: int, frame: Any) -> None:
        if said := summary():
            # Past sys.stderr: the signal may come in the middle of a write to it, which refuses another.
            with contextlib.suppress(OSError):
                os.write(2, f"{said}\n".encode())

    faulthandler.unregister(DUMP)  # or it would believe that it is still in front of the handler
    signal.signal(DUMP, handler)
    faulthandler.register(DUMP, chain=True)


def run_child(door: str, ready_fd: int, parent_pid: int) -> int:
    """The child's main: returns its exit code."""
    _die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _on_end(_raise_stopped)
    on_dump()
    spec = ChildSpec.from_json(sys.stdin.buffer.read())
    set_title(spec.title)
    configure_logging(spec.config.log_level, spec.title, spec.config.log_format)
    orphaned = False

    def tell(answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, json.dumps(answer).encode() + b"\n")

    try:
        module, _, attribute = door.partition(":")
        getattr(importlib.import_module(module), attribute)(spec, lambda info: tell({"ready": info}))
        code = 0
    except Stopped as stopped:
        orphaned = stopped.args == (ORPHANED,)
        code = 0
    except Exception as error:
        _on_end(signal.SIG_IGN)  # the parent sends STOP as soon as it is told
        if isinstance(error, ConfigError | ModelError):
            tell({"error": str(error)})
        else:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
        code = 1
    if orphaned or os.getppid() != parent_pid:  # nobody else is left to tidy up
        shutil.rmtree(spec.endpoints.folder, ignore_errors=True)
    return code


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ORPHANED)
    if os.getppid() != parent_pid:  # it died before the line above
        raise SystemExit(1)


def _on_end(handler: Any) -> None:
    for signum in (STOP, ORPHANED):
        signal.signal(signum, handler)


def _raise_stopped(signum: int, frame: Any) -> None:
    _on_end(signal.SIG_IGN)
    raise Stopped(signum)


if __name__ == "__main__":
    # Under -m this file is __main__; doors import srt.process, and there must be one of each class.
    from srt.process import run_child as imported_run_child

    exit_code = imported_run_child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # at once: what libraries tidy up may wait for other processes, which end as well
