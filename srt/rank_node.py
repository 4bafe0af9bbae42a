"""Shared, main process of a node that is not node 0: it starts its ranks and looks after them while they live."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from collections.abc import Sequence

from srt.board import Board
from srt.config import ServerConfig
from srt.model_files import ModelFiles
from srt.nodes import End, Node0
from srt.process import (
    FAULT_STOP_SECONDS,
    LAST_WORDS_SECONDS,
    Child,
    StartError,
    first_death,
    first_of,
    make_folder,
    unless,
)
from srt.replica import Replica
from srt.transport import Endpoints, Meeting
from srt.watchdog import StoppedRanks

LAST_MESSAGE_SECONDS = 5.0
"""How long node 0 may take to tell why the group ends, once this node has told it of a fault."""

log = logging.getLogger(__name__)


async def serve_ranks(config: ServerConfig, files: ModelFiles, scheduler_door: str) -> int:
    """Runs this node's ranks of a group whose HTTP is on node 0, until the group ends; the exit code is node 0's.

    A signal here ends the group as one to node 0 does, once the ranks have met.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    folder = make_folder()
    engine = Replica.create(config, Endpoints(folder))
    log.info("configuration: %s", config.summary())
    ranks = config.node_ranks
    log.info(
        "node %d of %d: ranks %d to %d of %d, no HTTP; all meet at %s",
        *(config.node_rank, config.nnodes, ranks[0], ranks[-1], config.tp_size, config.dist_init_addr),
    )
    children: list[Child] = []
    node_0: Node0 | None = None
    try:
        await engine.start_ranks(config, files, scheduler_door, children)
        answers = await unless(stop, asyncio.gather(*(child.ready() for child in children)))
        if answers is None:
            return 0
        shutil.rmtree(folder)  # all have opened the board; nobody could tidy up after a sudden end of this process
        node_0 = await Node0.connect(Meeting(**answers[0]), config.node_rank)
        running = asyncio.ensure_future(_run_ranks(node_0, children, engine.board, config.node_ranks))
        try:
            if await unless(stop, asyncio.shield(running)) is None:
                node_0.leave()
            reason = await running
        finally:
            running.cancel()
        if not reason:
            log.info("the group has been stopped")
            return 0
        log.error("%s; stopping", reason)
        return 1
    finally:
        await asyncio.gather(*(child.stop(FAULT_STOP_SECONDS) for child in children))
        if node_0 is not None:
            await node_0.close()
        engine.board.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _run_ranks(node_0: Node0, children: Sequence[Child], board: Board, ranks: range) -> str:
    """Tells node 0 when `ranks`, the children, are ready and what happens to them; returns when the group has ended.

    The reason is returned; it is empty if nothing went wrong.
    """
    deaths = [asyncio.ensure_future(_tell_death(node_0, child)) for child in children]
    try:
        ending = await first_of(node_0.end(), _fault(node_0, children, board, ranks))
        if isinstance(ending, str):
            node_0.fault(ending)
            ending = await first_of(node_0.end(), asyncio.sleep(LAST_MESSAGE_SECONDS, End(ending)))
    finally:
        for death in deaths:
            death.cancel()
    if ending.reason:
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if not any(child.has_ended for child in children):  # then somebody hangs
            for child in children:
                child.dump_stacks()
            await asyncio.sleep(LAST_WORDS_SECONDS)
    return ending.reason


async def _fault(node_0: Node0, children: Sequence[Child], board: Board, ranks: range) -> str:
    """The first that befalls a rank. Whether ranks hang is for node 0 to say, which sees them all."""
    try:
        await asyncio.gather(*(child.ready() for child in children))
    except StartError as error:
        return str(error)
    node_0.ready()
    log.info("ready: ranks %d to %d", ranks[0], ranks[-1])
    pids = dict(zip(ranks, (child.pid for child in children), strict=True))
    return await first_of(first_death(children), StoppedRanks(board, pids).fault())


async def _tell_death(node_0: Node0, child: Child) -> None:
    """At once: node 0's own ranks die of it, and it must know which death was the first."""
    obituary = await child.obituary()
    if child.was_killed:
        node_0.fault(obituary, is_death=True)
