"""The door of the whole server: flags in, a running house out.

Main process. Resolves the configuration once, starts the schedulers and the detokenizer as fresh interpreters, runs the
frontend here, and sees to it that all of them end together. The only file that names every door, as strings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import importlib.util
import logging
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from srt.board import Board
from srt.config import ConfigError, ServerConfig, parse_args
from srt.hardware import cuda_device_count, multiplies_bfloat16
from srt.limits import Limits
from srt.model_config import ModelConfig, ModelError
from srt.model_files import ModelFiles, locate
from srt.process import Child, ChildSpec, StartError, configure_logging, set_title
from srt.transport import Endpoints
from srt.watchdog import Watchdog, difference, first_failure, read_all, table

SCHEDULER_DOOR = "srt.scheduler.process:main"
DETOKENIZER_DOOR = "detokenizer.process:main"

DRAIN_SECONDS = 30.0
"""How long requests that run may go on after SIGTERM or Ctrl-C."""
STOP_SECONDS = 3.0
"""How long a child may take to end before it is killed."""
FAULT_STOP_SECONDS = 0.5
"""The same after a fault: a rank that waits for another one does not hear that it should end."""
LAST_WORDS_SECONDS = 0.3
"""How long the other processes may take to say what a death did to them, and to print where they are."""
FAREWELL_SECONDS = 1.0
"""How long clients may take to read that a process has died."""

log = logging.getLogger(__name__)

T = TypeVar("T")


def main(argv: Sequence[str] | None = None, scheduler_door: str = SCHEDULER_DOOR) -> int:
    """Serves until it is told to stop; the exit code. Another door puts another device below the same processes."""
    try:
        config = parse_args(argv)
    except ConfigError as error:
        return _refuse(error)
    set_title("main")
    configure_logging(config.log_level, "main")
    raise_descriptor_limit()
    try:
        listener = listen(config.host, config.port)
        files = locate(config.model_path, config.load_format, config.tokenizer_path, log=log.info)
        config = resolve(config, files.model_config, cuda_device_count())
    except (ConfigError, ModelError) as error:
        return _refuse(error)
    import uvloop

    return uvloop.run(serve(config, files, listener, scheduler_door))


def raise_descriptor_limit() -> None:
    """Every connection takes a descriptor; most systems give 1024 to those who do not ask for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Takes the address before anything slow happens. Connections wait in the backlog until the model is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} in use on {host}; choose another with --port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port {port} may not be used by this user; try one above 1023") from None
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def resolve(config: ServerConfig, model: ModelConfig, num_cuda_devices: int) -> ServerConfig:
    """Fills in what the user left to us, so that every process reads the same values; ConfigError if it cannot be."""
    device = config.device
    has_kernels = importlib.util.find_spec("flashinfer") is not None
    if device == "auto":
        device = "cuda" if num_cuda_devices and has_kernels and config.dtype != "float32" else "cpu"
    elif device == "cuda":
        if not num_cuda_devices:
            raise ConfigError("--device cuda needs an NVIDIA GPU and its driver; there is none, use --device cpu")
        if not has_kernels:
            raise ConfigError("--device cuda needs FlashInfer: pip install 'lockstep-server[cuda]'")
        if config.dtype == "float32":
            raise ConfigError("--dtype float32 is for the CPU; on a GPU attention computes in bfloat16 or float16")
    if device == "cuda" and config.tp_size > num_cuda_devices:
        raise ConfigError(f"--tp-size {config.tp_size} needs as many GPUs; this host has {num_cuda_devices}")
    _check_tp_size(config.tp_size, model)
    limit = model.max_position_embeddings
    if config.context_length is not None and config.context_length > limit:
        raise ConfigError(f"--context-length {config.context_length} exceeds the model's {limit} positions")
    on_cpu = device == "cpu"
    return dataclasses.replace(
        config,
        device=device,
        dtype=_natural_dtype(model, on_cpu) if config.dtype == "auto" else config.dtype,
        context_length=config.context_length or limit,
        mem_fraction_static=config.mem_fraction_static or (0.3 if on_cpu else 0.88),
        max_running_requests=config.max_running_requests or (64 if on_cpu else 256),
        chunked_prefill_size=config.chunked_prefill_size or (1024 if on_cpu else 8192),
    )


def _natural_dtype(model: ModelConfig, on_cpu: bool) -> str:
    """Decoding is as fast as weights are read, so two bytes: the checkpoint's type, or what loses or costs least."""
    return "bfloat16" if model.dtype == "bfloat16" or (on_cpu and multiplies_bfloat16()) else "float16"


def _check_tp_size(tp_size: int, model: ModelConfig) -> None:
    if tp_size == 1:
        return
    fitting = [size for size in range(1, model.num_heads + 1) if model.splits_into(size)]
    if tp_size not in fitting:
        raise ConfigError(
            f"--tp-size {tp_size} does not divide the model's {model.num_heads} heads, {model.num_kv_heads} KV heads "
            f"and {model.intermediate_size} feed-forward features; sizes that do: {', '.join(map(str, fitting))}"
        )


async def serve(config: ServerConfig, files: ModelFiles, listener: socket.socket, scheduler_door: str) -> int:
    """Runs the house until a signal (exit code 0) or until one of its processes dies or fails to start (1)."""
    from srt.frontend import app

    frontend: app.Frontend | None = None
    stop = asyncio.Event()

    def on_signal() -> None:
        if frontend is not None:
            frontend.drain()  # here and now: the next request must find the door closed
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal)
    folder = tempfile.mkdtemp(prefix="lockstep-")
    endpoints = Endpoints(folder)
    board = Board.create(endpoints.board, config.tp_size)
    _log_configuration(config)
    children: list[Child] = []
    patience = STOP_SECONDS
    try:
        children.append(await Child.start(DETOKENIZER_DOOR, _child_spec("detokenizer", 0, config, endpoints, files)))
        for rank in range(config.tp_size):
            spec = _child_spec(f"scheduler {rank}", rank, config, endpoints, files)
            children.append(await Child.start(scheduler_door, spec))
        answers = await _unless(stop, asyncio.gather(*(child.ready() for child in children)))
        if answers is None:
            return 0
        engine = answers[1]
        limits = Limits(config.context_length, engine["pool_tokens"], config.page_size)
        log.info("memory: %s", engine["memory"]["summary"])
        frontend = await app.serve(config, files, limits, endpoints, board, engine, listener)
        host = f"[{config.host}]" if ":" in config.host else config.host
        log.info("ready: http://%s:%d", host, listener.getsockname()[1])
        schedulers = children[1:]
        watchdog = Watchdog(board, [child.pid for child in schedulers], config.watchdog_timeout)
        fault = await _unless(stop, _first_of(_first_death(children), watchdog.fault()))
        if fault is None:
            log.info("stopping: no new requests, up to %.0f s for those that run", DRAIN_SECONDS)
            stop.clear()
            drained = frontend.drained(DRAIN_SECONDS)
            ending = await _unless(stop, _first_of(drained, _first_death(children), watchdog.fault()))
            if not isinstance(ending, str):
                if not ending:
                    frontend.fail("the server was stopped before this request was done")
                return 0
            fault = ending
        patience = FAULT_STOP_SECONDS
        reason = await _explain(fault, children, schedulers, board)
        log.error("%s; stopping", reason)
        frontend.fail(reason)
        await asyncio.sleep(FAREWELL_SECONDS)
        return 1
    except (StartError, ModelError) as error:
        return _refuse(error)
    finally:
        if frontend is not None:
            await frontend.stop()
        await asyncio.gather(*(child.stop(patience) for child in children))
        board.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _explain(fault: str, children: list[Child], schedulers: list[Child], board: Board) -> str:
    """Why the house must end; the ranks' last steps go to the log. `fault` is what was noticed first.

    One death or one wrong decision brings others after it, so the cause is not always what is noticed first.
    """
    if not any(child.has_ended for child in children):  # then somebody hangs
        for child in schedulers:
            child.dump_stacks()
    await asyncio.sleep(LAST_WORDS_SECONDS)
    records = read_all(board)
    if len(records) > 1:
        log.error("%s", table(records))
    killed = [await child.obituary() for child in children if child.was_killed]
    return difference(records) or next(iter(killed), None) or first_failure(records) or fault


def _child_spec(title: str, rank: int, config: ServerConfig, endpoints: Endpoints, files: ModelFiles) -> ChildSpec:
    return ChildSpec(
        title=title,
        rank=rank,
        config=config,
        endpoints=endpoints,
        model=files.model_config,
        folder=str(files.folder),
        tokenizer_folder=str(files.tokenizer_folder),
        weights=files.weights,
        gguf_path=None if files.gguf_path is None else str(files.gguf_path),
    )


async def _first_death(children: list[Child]) -> str:
    """How the first child that ends came to its end."""
    return await _first_of(*(child.obituary() for child in children))


async def _first_of(*coroutines: Awaitable[T]) -> T:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless(stop: asyncio.Event, coroutine: Awaitable[T]) -> T | None:
    """The coroutine's result, or None if `stop` is set first."""

    async def stopped() -> None:
        await stop.wait()

    return await _first_of(coroutine, stopped())


def _log_configuration(config: ServerConfig) -> None:
    shown = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    if config.api_key is not None:
        shown["api_key"] = "***"
    log.info("configuration: %s", " ".join(f"{name}={value}" for name, value in shown.items()))


def _refuse(error: Exception) -> int:
    print(f"lockstep: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
