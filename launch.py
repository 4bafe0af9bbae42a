"""The door of the whole server: flags in, a running house out.

Main process. Resolves the configuration once, starts the schedulers and the detokenizer as fresh interpreters, runs the
frontend here, and sees to it that all of them end together. The only file that names every door, as strings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from srt.chat_template import ChatTemplate
from srt.config import LEAST_BLOCK, ConfigError, ServerConfig, parse_args, split_address
from srt.hardware import cuda_device_count, multiplies_bfloat16
from srt.listeners import listen, own_listener
from srt.model_config import ModelConfig, ModelError
from srt.model_files import ModelFiles, locate
from srt.nodes import Nodes
from srt.observe import tracing
from srt.observe.logs import configure_logging
from srt.process import (
    FAULT_STOP_SECONDS,
    LAST_WORDS_SECONDS,
    STOP_SECONDS,
    Child,
    HttpShare,
    StartError,
    first_death,
    first_of,
    make_folder,
    on_dump,
    set_title,
    settle,
    unless,
)
from srt.rank_node import serve_ranks
from srt.replica import Replica, child_spec
from srt.tls import tls_context
from srt.transport import Endpoints, Meeting
from srt.watchdog import stopped

if TYPE_CHECKING:
    from srt.frontend.app import Frontend

SCHEDULER_DOOR = "srt.scheduler.process:main"
DETOKENIZER_DOOR = "detokenizer.process:main"
HTTP_WORKER_DOOR = "srt.frontend.http_worker:main"
BOARD_RELAY_DOOR = "srt.board_relay:main"

DRAIN_SECONDS = 30.0
"""How long requests that run may go on after SIGTERM or Ctrl-C."""
WORKER_STOP_SECONDS = 4.5
"""How long an HTTP worker may take for what it is writing, and for its traces, before it is killed."""
LEAST_DESCRIPTORS = 64
"""About half of them are for clients."""
FAREWELL_SECONDS = 1.0
"""How long clients may take to read that a process has died."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, scheduler_door: str = SCHEDULER_DOOR) -> int:
    """Serves until it is told to stop; the exit code. Another door puts another device below the same processes."""
    try:
        config = parse_args(argv)
    except ConfigError as error:
        return _refuse(error)
    set_title("main")
    configure_logging(config.log_level, "main", config.log_format)
    on_dump()
    try:
        raise_descriptor_limit()
        tls_context(config)  # refused before the model is loaded
        listeners = listen(config.host, config.port, config.http_workers) if config.node_rank == 0 else []
        config, files = prepare(config)
        import uvloop

        if not listeners:
            return uvloop.run(serve_ranks(config, files, scheduler_door))
        return uvloop.run(serve(config, files, CommandLine(config, listeners), scheduler_door))
    except (ConfigError, ModelError, StartError) as error:
        return _refuse(error)


def prepare(config: ServerConfig) -> tuple[ServerConfig, ModelFiles]:
    """Finds the model and resolves the configuration for it. ConfigError or ModelError if it cannot be served."""
    files = locate(config.model_path, config.load_format, config.tokenizer_path, log=log.info)
    if config.chat_template is not None and config.node_rank == 0:
        try:
            ChatTemplate.from_folder(files.tokenizer_folder, Path(config.chat_template))
        except ModelError as error:
            raise ConfigError(f"--chat-template: {error}") from None
    return resolve(config, files.model_config, cuda_device_count()), files


def raise_descriptor_limit() -> None:
    """Every connection takes a descriptor; most systems give 1024 to those who do not ask for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most in range(LEAST_DESCRIPTORS):  # -1 is without a limit
        raise ConfigError(f"a process may have {most} files open here; allow {LEAST_DESCRIPTORS} or more (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
    if device == "cpu" and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is for GPUs; on a CPU leave it out, and lower --context-length "
            "or --max-total-tokens if K/V take too much memory"
        )
    if config.otlp_traces_endpoint is not None and not tracing.is_available():
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'lockstep-server[otlp]'")
    _check_tp_size(config, model)
    if config.nnodes > 1 and config.dp_size > 1:
        raise ConfigError(
            "--dp-size shares out requests on one host; take --nnodes 1, or a router before several servers"
        )
    if device == "cuda" and config.ranks_per_host > num_cuda_devices:
        many = (
            "as many GPUs" if config.nnodes == 1 else f"{config.ranks_per_node} GPUs on each of {config.nnodes} nodes"
        )
        times = f"--dp-size {config.dp_size} times " if config.dp_size > 1 else ""
        raise ConfigError(f"{times}--tp-size {config.tp_size} needs {many}; this host has {num_cuda_devices}")
    host_gib = config.hierarchical_cache_gb * config.ranks_per_host
    if host_gib > (memory_gib := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30):
        raise ConfigError(
            f"--hierarchical-cache-gb: {host_gib:g} GiB in all are above this host's {memory_gib:.1f} GiB"
        )
    limit = model.max_position_embeddings
    if config.context_length is not None and config.context_length > limit:
        raise ConfigError(f"--context-length {config.context_length} exceeds the model's {limit} positions")
    on_cpu = device == "cpu"
    return dataclasses.replace(
        config,
        device=device,
        dtype=_natural_dtype(model, on_cpu) if config.dtype == "auto" else config.dtype,
        context_length=config.context_length or limit,
        page_size=config.page_size or (1 if config.kv_events is None else LEAST_BLOCK),
        mem_fraction_static=config.mem_fraction_static or (0.3 if on_cpu else 0.88),
        max_running_requests=config.max_running_requests or (64 if on_cpu else 256),
        chunked_prefill_size=config.chunked_prefill_size or (1024 if on_cpu else 8192),
    )


def _natural_dtype(model: ModelConfig, on_cpu: bool) -> str:
    """Decoding is as fast as weights are read, so two bytes: the checkpoint's type, or what loses or costs least."""
    return "bfloat16" if model.dtype == "bfloat16" or (on_cpu and multiplies_bfloat16()) else "float16"


def _check_tp_size(config: ServerConfig, model: ModelConfig) -> None:
    size, nodes = config.tp_size, config.nnodes
    if size == nodes == 1:
        return
    sizes = [size for size in range(1, model.num_heads + 1) if model.splits_into(size)]
    fitting = [size for size in sizes if size % nodes == 0]
    would = f"sizes that do: {', '.join(map(str, fitting))}" if fitting else "no size does"
    if size not in sizes:
        raise ConfigError(
            f"--tp-size {size} does not divide the model's {model.num_heads} heads, {model.num_kv_heads} KV heads "
            f"and {model.intermediate_size} feed-forward features; {would}"
        )
    if size not in fitting:
        raise ConfigError(f"--tp-size {size} does not spread evenly over --nnodes {nodes}; {would}")


class Owner(Protocol):
    """For whom the house runs: the command line, or the program that this process belongs to."""

    listeners: list[socket.socket]  # of HTTP

    def on_stop(self, stop: Callable[[], None]) -> None:
        """`stop` is to be called, in the event loop, when the house should end."""

    def ready(self, frontend: Frontend) -> str:
        """From now on requests are taken; returns where, for the log of other nodes."""


class CommandLine:
    """Requests come over HTTP, and signals end the house."""

    def __init__(self, config: ServerConfig, listeners: list[socket.socket]) -> None:
        self.listeners = listeners
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = listeners[0].getsockname()[1]
        self._url = f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"

    def on_stop(self, stop: Callable[[], None]) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stop)

    def ready(self, frontend: Frontend) -> str:
        settle()
        log.info("ready: %s", self._url)
        on_dump(frontend.summary)
        return self._url


async def serve(config: ServerConfig, files: ModelFiles, owner: Owner, scheduler_door: str = SCHEDULER_DOOR) -> int:
    """Runs the house until its owner stops it (exit code 0) or one of its processes dies (1).

    StartError, ModelError or ConfigError if one cannot start. Of several nodes this is node 0, and the house is the
    whole group.
    """
    from srt.cluster.balancer import make_balancer
    from srt.frontend import app

    frontend: app.Frontend | None = None
    stop, hurry = asyncio.Event(), asyncio.Event()  # the first signal, and any after it

    def on_signal() -> None:
        if frontend is not None:
            frontend.drain()  # here and now: the next request must find the door closed
        if stop.is_set():
            hurry.set()
        stop.set()

    owner.on_stop(on_signal)
    if not owner.listeners:
        config = dataclasses.replace(config, http_workers=1)
    folder = make_folder()
    engines = [Replica.create(config, Endpoints(folder, dp_rank)) for dp_rank in range(config.dp_size)]
    endpoints = engines[0].endpoints  # what all engines have in common
    log.info("configuration: %s", config.summary())
    nodes = Nodes(config.nnodes, on_leave=on_signal)
    children: list[Child] = []
    workers: list[Child] = []  # of them those that speak HTTP, if it is not this process
    patience, reason = STOP_SECONDS, ""
    try:
        meeting = await _await_nodes(config, nodes, endpoints, files, children) if config.nnodes > 1 else None
        for engine in engines:
            await engine.start_ranks(config, files, scheduler_door, children, meeting)
        schedulers = [child for engine in engines for child in engine.schedulers]
        detokenizer = await Child.start(DETOKENIZER_DOOR, child_spec("detokenizer", 0, config, endpoints, files))
        children.append(detokenizer)
        answers = await unless(stop, _group_ready([*schedulers, detokenizer], nodes))
        if answers is None:
            return 0
        if isinstance(answers, str):
            raise StartError(await _explain(answers, children, engines, nodes))
        infos = answers[: len(schedulers) : config.ranks_per_node]  # of each engine's rank 0
        for engine, info in zip(engines, infos, strict=True):
            log.info("%smemory: %s", engine.prefix, info["memory"]["summary"])
        pools = [info["pool_tokens"] for info in infos]
        if min(pools) < config.context_length:
            log.warning(
                "the KV cache holds %d tokens and the context %d: longer requests than the cache holds are refused",
                *(min(pools), config.context_length),
            )
        if config.kv_events is not None:
            log.info("KV events: %s", ", ".join(config.kv_events.endpoint_of(rank) for rank in range(config.dp_size)))
        frontend = await app.serve(
            config,
            files,
            [engine.endpoints for engine in engines],
            [engine.board for engine in engines],
            infos,
            make_balancer(config.load_balance_method, pools, config.page_size, not config.disable_radix_cache),
            own_listener(owner.listeners, endpoints),
        )
        if len(owner.listeners) > 1:
            for number, listener in enumerate(owner.listeners, 1):
                share = HttpShare(number, listener.fileno(), files.name, infos)
                spec = child_spec(f"http worker {number}", 0, config, endpoints, files, http=share)
                workers.append(await Child.start(HTTP_WORKER_DOOR, spec))
                children.append(workers[-1])
                listener.close()  # or who connects once the worker has ended would wait for ever
            answers = await unless(stop, _group_ready(workers, nodes))
            if answers is None:
                return 0
            if isinstance(answers, str):
                raise StartError(await _explain(answers, children, engines, nodes))
            frontend.admit([endpoints.frontend_of(number) for number in range(1, config.frontends)])
        nodes.serving(owner.ready(frontend))

        def any_fault() -> Awaitable[str]:
            return first_of(
                first_death(children),
                nodes.fault(),
                *(stopped(child.title, child.pid) for child in (detokenizer, *workers)),
                frontend.fault(),
                *(engine.fault(config) for engine in engines),
            )

        fault = await unless(stop, any_fault())
        if fault is None:
            log.info("stopping: no new requests, up to %.0f s for those that run", DRAIN_SECONDS)
            drained = frontend.drained(DRAIN_SECONDS)
            ending = await unless(hurry, first_of(drained, any_fault()))
            if not isinstance(ending, str):
                frontend.cut()
                return 0
            fault = ending
        patience = FAULT_STOP_SECONDS
        reason = await _explain(fault, children, engines, nodes)
        log.error("%s; stopping", reason)
        frontend.fail(reason)
        await nodes.end(reason)
        await asyncio.sleep(FAREWELL_SECONDS)
        return 1
    except (StartError, ModelError, ConfigError) as error:
        reason = str(error)
        raise
    finally:
        await asyncio.gather(*(worker.stop(WORKER_STOP_SECONDS) for worker in workers))
        if frontend is not None:
            await frontend.stop()
        await asyncio.gather(*(child.stop(patience) for child in children), nodes.end(reason))
        for engine in engines:
            engine.board.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _await_nodes(
    config: ServerConfig, nodes: Nodes, endpoints: Endpoints, files: ModelFiles, children: list[Child]
) -> Meeting:
    """Listens for the other nodes, here and in the board's relay."""
    host, _ = split_address(config.dist_init_addr)
    try:
        meeting = await nodes.listen(host)
    except OSError as error:
        raise ConfigError(f"--dist-init-addr {host} is not an address of node 0: {error.strerror}") from None
    spec = child_spec("board relay", 0, config, endpoints, files, meeting)
    relay = await Child.start(BOARD_RELAY_DOOR, spec)
    children.append(relay)
    return dataclasses.replace(meeting, board_port=(await relay.ready())["port"])


async def _group_ready(children: list[Child], nodes: Nodes) -> list[dict[str, Any]] | str:
    """What the children say once all are ready, here and on other nodes; or what has gone wrong."""
    answers = await first_of(asyncio.gather(*(child.ready() for child in children)), nodes.fault())
    if isinstance(answers, str):
        return answers
    fault = await first_of(nodes.all_ready(), nodes.fault(), first_death(children))
    return fault or answers


async def _explain(fault: str, children: list[Child], engines: list[Replica], nodes: Nodes) -> str:
    """Why the house must end; the ranks' last steps go to the log. `fault` is what was noticed first.

    One death or one wrong decision brings others after it, so the cause is not always what is noticed first.
    """
    await asyncio.sleep(LAST_WORDS_SECONDS)
    differences, failures = [], []
    for engine in engines:
        differing, failed = engine.findings()
        differences += differing
        failures += failed
    killed = [await child.obituary() for child in children if child.was_killed] + nodes.deaths
    found = [*differences, *killed, *failures]
    if not found and not any(child.has_ended for child in children):  # then somebody hangs
        for engine in engines:
            for child in engine.schedulers:
                child.dump_stacks()  # which they do while clients read why the house ends
    return next(iter(found), fault)


def _refuse(error: Exception) -> int:
    print(f"lockstep: {error}", file=sys.stderr)
    return 1


def command() -> NoReturn:
    """Ends at once: a thread may be busy with somebody's grammar, and Python would wait for it."""
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
