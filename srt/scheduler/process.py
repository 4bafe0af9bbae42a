"""L2, each rank: the door of a scheduler process and its composition root, the one place that sees ledger and model.

`main` is what launch starts; `run` takes the maker of the executor, so that a benchmark can put a device of its own
under the very same processes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from radix import Ledger
from srt.board import Board, Phase, RankRecord
from srt.messages import FlushReply, TokenBatch
from srt.process import ChildSpec, Ready
from srt.scheduler.consensus import BoardConsensus
from srt.scheduler.intake import LeaderIntake
from srt.scheduler.interfaces import Executor
from srt.scheduler.observer import BoardObserver
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.policy import ORDERS
from srt.scheduler.scheduler import Scheduler
from srt.token_bytes import TokenBytes
from srt.transport import Sender

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """An executor that is ready, and how much it holds."""

    executor: Executor
    pool_tokens: int  # a multiple of the page size
    memory: dict[str, Any]  # for the start-up report and /server_info; JSON types


MakeDevice = Callable[[ChildSpec, TokenBytes], Device]


class ZmqOutlet:
    """The leader's way out: tokens to the detokenizer, replies straight to the frontend."""

    def __init__(self, detokenizer: Sender, frontend: Sender) -> None:
        self._detokenizer = detokenizer
        self._frontend = frontend

    def tokens(self, batch: TokenBatch) -> None:
        if batch.deltas:
            self._detokenizer.send(batch)

    def reply(self, message: FlushReply) -> None:
        self._frontend.send(message)


def main(spec: ChildSpec, ready: Ready) -> None:
    run(spec, ready, _load_model)


def run(spec: ChildSpec, ready: Ready, make_device: MakeDevice) -> None:
    """Builds this rank's engine and runs its loop until the process is stopped."""
    config = spec.config
    record = RankRecord(Board(spec.endpoints.board, config.tp_size), spec.rank)
    token_bytes = TokenBytes.from_folder(Path(spec.tokenizer_folder))
    device = make_device(spec, token_bytes)
    ledger = Ledger(
        num_pages=device.pool_tokens // config.page_size,
        page_size=config.page_size,
        num_rows=config.max_running_requests,
        context_length=config.context_length,
        cache_enabled=not config.disable_radix_cache,
    )
    planner = Planner(ledger, ORDERS[config.schedule_policy], config.chunked_prefill_size, config.max_running_requests)
    output = Output(token_bytes.table, token_bytes.is_special)
    observer = BoardObserver(record, planner, output, ledger)
    observer.step()
    context = zmq.Context()
    scheduler = Scheduler(
        ledger=ledger,
        planner=planner,
        output=output,
        executor=device.executor,
        intake=LeaderIntake(spec.endpoints.leader, context, lambda: record.beat(Phase.IDLE)),
        outlet=ZmqOutlet(Sender(spec.endpoints.detokenizer, context), Sender(spec.endpoints.frontend, context)),
        consensus=BoardConsensus(record, planner, output, ledger),
        observer=observer,
        grammars=None,
        eos_token_ids=spec.model.eos_token_ids,
        overlap=not config.disable_overlap_schedule,
    )
    gc.collect()
    gc.freeze()  # what is loaded now stays: no collection need look at it again
    record.beat(Phase.IDLE)
    ready({"pool_tokens": device.pool_tokens, "memory": device.memory})
    try:
        scheduler.run()
    finally:
        record.beat(Phase.STOPPED)
        context.destroy()


def _load_model(spec: ChildSpec, token_bytes: TokenBytes) -> Device:
    """Weights first, then the pool: as large as what is left allows."""
    from srt.executor.device import free_memory, held_memory, resolve_device, resolve_dtype
    from srt.executor.memory_plan import plan_memory
    from srt.executor.model_runner import ModelRunner
    from srt.executor.weights import iterate_weights
    from srt.model_files import ModelFiles
    from srt.models.loader import load_model

    config, model_config = spec.config, spec.model
    device, dtype = resolve_device(config), resolve_dtype(config)
    gguf_path = Path(spec.gguf_path) if spec.gguf_path else None
    files = ModelFiles(
        spec.title, Path(spec.folder), Path(spec.tokenizer_folder), spec.weights, gguf_path, model_config
    )
    free_before, held_before = free_memory(device), held_memory(device)
    weights = iterate_weights(files, dtype, seed=config.random_seed or 0, progress=spec.rank == 0)
    model = load_model(model_config, weights, dtype, device, context_length=config.context_length)
    plan = plan_memory(
        free_before=free_before,
        free_after=free_before - (held_memory(device) - held_before),
        fraction=config.mem_fraction_static,
        bytes_per_token=model_config.kv_elements_per_token * dtype.itemsize,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
    )
    runner = ModelRunner(
        model,
        model_config,
        num_rows=config.max_running_requests,
        context_length=config.context_length,
        pool_tokens=plan.pool_tokens,
        page_size=config.page_size,
        num_tokens_vocab=len(token_bytes.table),
        kv_dtype=dtype,
        device=device,
    )
    memory = {
        "summary": str(plan),
        "weights_bytes": plan.weights,
        "kv_bytes": plan.pool_bytes,
        "pool_tokens": plan.pool_tokens,
    }
    return Device(runner, plan.pool_tokens, memory)
