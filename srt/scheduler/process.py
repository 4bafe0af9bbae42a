"""L2, each rank: the door of a scheduler process and its composition root, the one place that sees scheduler and model.

`main` is what launch starts; `run` takes the maker of the executor, so that a benchmark can put a device of its own
under the very same processes.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from srt.board import GRAMMARS, Board, Phase, RankRecord, Record
from srt.board_relay import Mirror
from srt.cluster.publisher import Publisher
from srt.config import ServerConfig
from srt.constrained.manager import GrammarManager
from srt.process import ChildSpec, Ready, end_at_once_when_orphaned, end_at_once_when_stopped, on_dump
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.inbox_log import InboxLog, LoggedDrafter, LoggedExecutor, LoggedGrammars, LoggedIntake, LoggedRecord
from srt.scheduler.intake import FollowerIntake, LeaderIntake
from srt.scheduler.interfaces import Drafter, Executor, Intake, Maintenance, Outlet
from srt.scheduler.jump_forward import JumpForward
from srt.scheduler.outlet import AgreedOutlet, SilentOutlet, ZmqOutlet
from srt.scheduler.readiness import GrammarReadiness
from srt.scheduler.stopwatch import Stopwatch
from srt.token_bytes import TokenBytes
from srt.tokenization import Tokenizer
from srt.transport import Meeting, Sender

if TYPE_CHECKING:
    from srt.parallel import Ranks


@dataclass(frozen=True)
class Device:
    """An executor that is ready, and how much it holds."""

    executor: Executor
    pool_tokens: int  # a multiple of the page size
    memory: dict[str, Any]  # for the start-up report and /server_info; JSON types
    maintenance: Maintenance | None = None
    host_tokens: int = 0  # of host memory for evicted prefixes, a multiple of the page size
    restore_least: int = 1  # the least tokens that come back from there sooner than they are computed
    overlaps: bool = True  # it computes while the scheduler plans and commits


MakeDevice = Callable[[ChildSpec, TokenBytes, "Ranks | None"], Device]
"""The last argument is None where one rank is all there is."""


def main(spec: ChildSpec, ready: Ready) -> None:
    run(spec, ready, _load_model)


def run(spec: ChildSpec, ready: Ready, make_device: MakeDevice) -> None:
    """Builds this rank's engine and runs its loop until the process is stopped."""
    board = Board(spec.endpoints.board, spec.config.tp_size)
    record = RankRecord(board, spec.rank)
    if spec.rank > 0:
        end_at_once_when_stopped()
    elif board.num_ranks > 1:
        end_at_once_when_orphaned()  # what it waits for may be a kernel that waits for a rank that has ended
    # Threads of OpenMP, which torch multiplies with, by default spin for milliseconds when a kernel is over, in which
    # they keep the threads of our own kernels from running.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # What torch's profiler imports makes this folder at once, though nothing is compiled into it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", spec.endpoints.folder)
    if spec.config.ranks_per_host > 1:
        _share_cores(spec.config)
    if spec.config.device == "cuda":
        _take_gpu(spec.local_rank)
    ranks = _meet(spec) if board.num_ranks > 1 else None
    try:
        if spec.config.nnodes > 1:
            _join_nodes(spec, ready, record, ranks)
        _run(spec, ready, make_device, board, record, ranks)
    except Exception as error:
        record.fail(f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        record.beat(Phase.STOPPED)
        raise
    finally:
        if ranks is not None:
            ranks.close()


def _share_cores(config: ServerConfig) -> None:
    """Gives this rank its part of the host's cores."""
    import torch

    threads = max(1, torch.get_num_threads() // config.ranks_per_host)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for compiled code that brings an OpenMP of its own


def _take_gpu(index: int) -> None:
    """NCCL, Triton and whatever else is not told a device work on the current one."""
    import torch

    torch.cuda.set_device(index)


def _meet(spec: ChildSpec) -> Ranks:
    """Joins the other ranks; ConfigError if one of them would not compute the same."""
    from srt.parallel import Ranks, check_alike, fingerprint
    from srt.rendezvous import meet_at_node_0, meet_on_host

    config = spec.config
    backend = "nccl" if config.device == "cuda" else "gloo"
    if config.nnodes > 1:
        store = meet_at_node_0(config, spec.rank)
    else:
        store = meet_on_host(spec.endpoints.rendezvous, config.tp_size)
    ranks = Ranks(store, spec.rank, config.tp_size, backend)
    check_alike(ranks.gather(fingerprint(config.shared())))
    return ranks


def _join_nodes(spec: ChildSpec, ready: Ready, record: RankRecord, ranks: Ranks) -> None:
    """Ranks hear where node 0 listens; those of other nodes write to its board from here on, and tell their parent."""
    meetings = ranks.gather({} if spec.meeting is None else dataclasses.asdict(spec.meeting))
    if spec.rank not in range(spec.config.ranks_per_node):
        meeting = Meeting(**meetings[0])
        record.mirror(Mirror(meeting, spec.rank).write)
        ready(dataclasses.asdict(meeting))


def _run(
    spec: ChildSpec, ready: Ready, make_device: MakeDevice, board: Board, record: RankRecord, ranks: Ranks | None
) -> None:
    config = spec.config
    # What may be refused comes before the model, which takes its time.
    publisher = inbox_log = None
    if config.inbox_log is not None and spec.rank == 0:
        dp_rank = spec.endpoints.dp_rank
        inbox_log = InboxLog(config.inbox_log + (f"_dp{dp_rank}" if dp_rank else ""))
    if config.kv_events is not None and spec.rank == 0:
        publisher = Publisher(config.kv_events, spec.endpoints.dp_rank, config.page_size)
    tokenizer = Tokenizer.from_folder(Path(spec.tokenizer_folder))
    token_bytes = tokenizer.token_bytes
    with ThreadPoolExecutor(1) as beside:
        grammars_there = beside.submit(_grammars, spec, tokenizer, record)
        device = make_device(spec, token_bytes, ranks)
    grammars = grammars_there.result()
    settings = Settings(
        num_pages=device.pool_tokens // config.page_size,
        page_size=config.page_size,
        num_rows=config.max_running_requests,
        context_length=config.context_length,
        cache_enabled=not config.disable_radix_cache,
        policy=config.schedule_policy,
        low_priority_first=config.schedule_low_priority_values_first,
        token_budget=config.chunked_prefill_size,
        overlap=device.overlaps and not config.disable_overlap_schedule,
        eos_token_ids=spec.model.eos_token_ids,
        token_bytes=tuple(token_bytes.table),
        is_special=bytes(token_bytes.is_special),
        host_pages=device.host_tokens // config.page_size,
        restore_least=device.restore_least,
        waiting_timeout=math.inf if config.waiting_timeout is None else config.waiting_timeout,
    )
    context = zmq.Context()
    intake, outlet = _ends(spec, context, board, ranks, GrammarReadiness(board, grammars))
    executor, shown, followed = device.executor, record, grammars
    drafter: Drafter = JumpForward(grammars)
    if inbox_log is not None:
        inbox_log.write(settings)
        intake, executor = LoggedIntake(intake, inbox_log), LoggedExecutor(executor, inbox_log)
        shown, followed = LoggedRecord(record, inbox_log), LoggedGrammars(grammars, inbox_log)
        drafter = LoggedDrafter(drafter, inbox_log)
    if spec.rank == 0:
        executor = outlet = Stopwatch(executor, outlet)
    page_log = None if publisher is None else publisher.log
    scheduler = assemble(
        settings,
        executor=executor,
        intake=intake,
        outlet=outlet,
        record=shown,
        grammars=followed,
        drafter=drafter,
        page_log=page_log,
        maintenance=device.maintenance,
    )
    gc.collect()
    gc.freeze()  # what is loaded now stays: no collection need look at it again
    on_dump(lambda: f"{spec.title}: {_summary(board.read(spec.rank))}")
    ready({"pool_tokens": device.pool_tokens, "memory": device.memory})
    try:
        scheduler.run()
    finally:
        context.destroy()
        if publisher is not None:
            publisher.close()


def _summary(record: Record) -> str:
    """Of the ledger as the last step left it."""
    gauges = ", ".join(f"{name} {value}" for name, value in record.gauges.items())
    return f"step {record.step}, {record.phase.name.lower()}, {gauges}"


def _grammars(spec: ChildSpec, tokenizer: Tokenizer, record: RankRecord) -> GrammarManager:
    return GrammarManager(tokenizer.vocabulary(spec.model.eos_token_ids), record.grammar, GRAMMARS)


def _ends(
    spec: ChildSpec, context: zmq.Context, board: Board, ranks: Ranks | None, readiness: GrammarReadiness
) -> tuple[Intake, Outlet]:
    """Where this rank's inboxes come from and where its results go: only the leader has sockets."""
    if spec.rank > 0:
        assert ranks is not None
        return FollowerIntake(ranks), SilentOutlet()
    endpoints = spec.endpoints
    outlet: Outlet = ZmqOutlet(Sender(endpoints.detokenizer, context), Sender(endpoints.frontend, context))
    if ranks is not None:
        outlet = AgreedOutlet(outlet, board)
    return LeaderIntake(endpoints.leader, context, ranks, readiness), outlet


def _load_model(spec: ChildSpec, token_bytes: TokenBytes, ranks: Ranks | None) -> Device:
    """Weights first, then the pool: as large as what is left allows, on the rank with the least."""
    from srt.executor.device import (
        free_memory,
        held_memory,
        make_executor,
        resolve_device,
        resolve_dtype,
        resolve_kv_dtype,
    )
    from srt.executor.maintenance import ModelMaintenance, Weights
    from srt.executor.memory_plan import available_ram, gib, plan_memory
    from srt.executor.restore_cost import MEASURED_TOKENS, restore_least
    from srt.executor.weights import iterate_weights
    from srt.model_config import ModelError
    from srt.model_files import ModelFiles
    from srt.models.llama import LlamaForCausalLM
    from srt.models.loader import load_model
    from srt.parallel import ParallelContext, check_balance

    config, model_config = spec.config, spec.model
    device, dtype = resolve_device(config, spec.local_rank), resolve_dtype(config)
    parallel = ParallelContext() if ranks is None else ranks.context
    if ranks is not None and device.type == "cuda":
        parallel = ranks.share_memory(model_config.hidden_size, dtype)
    gguf_path = Path(spec.gguf_path) if spec.gguf_path else None
    files = ModelFiles(
        spec.title, Path(spec.folder), Path(spec.tokenizer_folder), spec.weights, gguf_path, model_config
    )
    free_before, held_before = free_memory(device), held_memory(device)
    if device.type == "cpu":
        free_before //= config.ranks_per_host  # who share its memory
    if ranks is not None:
        check_balance([rank["free"] for rank in ranks.gather({"free": free_before})])
    progress = spec.rank == spec.endpoints.dp_rank == 0 and config.log_format == "text"
    weights = iterate_weights(files, dtype, seed=config.random_seed or 0, progress=progress, device=device)

    def make_model(weights: Weights) -> LlamaForCausalLM:
        return load_model(model_config, weights, dtype, device, context_length=config.context_length, parallel=parallel)

    model = make_model(weights)
    plan = plan_memory(
        free_before=free_before,
        free_after=free_before - (held_memory(device) - held_before),
        fraction=config.mem_fraction_static,
        bytes_per_token=model_config.kv_elements_per_rank(parallel.size) * resolve_kv_dtype(config).itemsize,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
    )
    if ranks is not None:
        pool_tokens = min(rank["pool_tokens"] for rank in ranks.gather({"pool_tokens": plan.pool_tokens}))
        plan = dataclasses.replace(plan, pool_tokens=pool_tokens)
    host_bytes = 0 if config.disable_radix_cache else int(config.hierarchical_cache_gb * 2**30)
    if host_bytes * config.ranks_per_host > (available := available_ram()):
        ranks_here = f" for each of {config.ranks_per_host} ranks" if config.ranks_per_host > 1 else ""
        raise ModelError(
            f"--hierarchical-cache-gb {config.hierarchical_cache_gb:g}{ranks_here} is more than the {gib(available)} "
            "of memory that this host has left"
        )
    host_tokens = host_bytes // plan.bytes_per_token // config.page_size * config.page_size
    executor = make_executor(model, model_config, config, plan, len(token_bytes.table), device, parallel, host_tokens)
    least = 1
    if host_tokens:
        # Every rank computes, since they do it together; what rank 0 measures is true for all.
        num_tokens = min(
            MEASURED_TOKENS, config.chunked_prefill_size, config.context_length - 1, plan.pool_tokens, host_tokens
        )
        least = restore_least(executor, num_tokens, config.page_size)
        if ranks is not None:
            least = ranks.gather({"restore_least": least})[0]["restore_least"]
    summary = str(plan)
    if device.type != "cpu":
        summary += f"; {gib(free_memory(device))} free beside them, graphs and workspaces"
    memory = {
        "summary": summary,
        "weights_bytes": plan.weights,
        "kv_bytes": plan.pool_bytes,
        "pool_tokens": plan.pool_tokens,
    }
    if host_tokens:
        memory["host_tokens"], memory["restore_least"] = host_tokens, least
    name = spec.title if config.dp_size > 1 else f"rank {spec.rank}"
    swap = executor.take_model if device.type == "cpu" else (lambda same: None)
    maintenance = ModelMaintenance(model, files, dtype, device, ranks, name, make_model, swap)
    return Device(executor, plan.pool_tokens, memory, maintenance, host_tokens, least, overlaps=device.type != "cpu")
