"""Shared, main process of a node that is not node 0: what it does while its ranks live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from srt.board import Board
from srt.nodes import End, Node0
from srt.process import LAST_WORDS_SECONDS, Child, StartError, first_death, first_of
from srt.watchdog import StoppedRanks

LAST_MESSAGE_SECONDS = 5.0
"""How long node 0 may take to tell why the group ends, once this node has told it of a fault."""

log = logging.getLogger(__name__)


async def run_ranks(node_0: Node0, children: Sequence[Child], board: Board, ranks: range) -> str:
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
