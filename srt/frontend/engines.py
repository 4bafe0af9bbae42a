"""L1, every process that speaks HTTP: what the engines are asked beside generating. Owns whether they are paused.

All are asked alike and must stay alike: one answer stands for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from srt.frontend.balancer import Balancer
from srt.frontend.errors import RequestError
from srt.frontend.tokenizer_manager import REPLY_SECONDS, TokenizerManager
from srt.messages import (
    ContinueGeneration,
    ControlItem,
    ControlReply,
    FlushCache,
    PauseGeneration,
    ShowTree,
    StartProfile,
    StopProfile,
    TreeReply,
    UpdateWeights,
)
from srt.transport import BurstSender

SLOW_REPLY_SECONDS = 1800.0
"""How long an engine may take that reads or writes files."""
TREE_SECONDS = 0.5
"""The same for its tree: an engine deep in a long step is not waited for."""


class Engines:
    """Each method raises RequestError if an engine does not answer in time; it may do what was asked yet."""

    def __init__(self, manager: TokenizerManager, balancer: Balancer) -> None:
        self.paused = False
        self.broken = asyncio.Event()  # they may not be alike any more, so all must end
        self._manager = manager
        self._balancer = balancer

    async def flush_cache(self, timeout_s: float) -> ControlReply:
        reply = await self._ask_all(lambda ticket: FlushCache(ticket, timeout_s), timeout_s + REPLY_SECONDS)
        if reply.ok:
            self._forget_caches()
        return reply

    async def pause(self, *, retract: bool = False) -> ControlReply:
        """With the reply no step is under way, and with `retract` nobody has memory."""
        self.paused = True  # an engine that does not answer in time does it later
        return await self._ask_all(lambda ticket: PauseGeneration(ticket, retract))

    async def resume(self) -> ControlReply:
        self.paused = False
        return await self._ask_all(ContinueGeneration)

    async def start_profile(self, folder: str, num_steps: int) -> ControlReply:
        return await self._ask_all(lambda ticket: StartProfile(ticket, folder, num_steps), SLOW_REPLY_SECONDS)

    async def stop_profile(self) -> ControlReply:
        return await self._ask_all(StopProfile, SLOW_REPLY_SECONDS)

    async def update_weights(self, folder: str) -> ControlReply:
        """While all is paused; the cache is empty behind it. What runs is computed again with the new weights."""
        was_paused = self.paused
        try:
            await self.pause(retract=True)
            return await self._update_all(folder)
        finally:
            self._forget_caches()
            if not was_paused:
                await self.resume()

    async def tree(self, engine: int, most_nodes: int, most_tokens: int) -> TreeReply:
        """The radix tree of an engine as it is now."""
        leader = self._manager.leaders[engine]
        return await self._manager.ask(leader, lambda ticket: ShowTree(ticket, most_nodes, most_tokens), TREE_SECONDS)

    async def _update_all(self, folder: str) -> ControlReply:
        """All engines have the new weights behind it, or all the old ones; else the server has failed."""

        async def update(leaders: Iterable[BurstSender], folder: str | None) -> list[ControlReply]:
            ask = self._manager.ask
            asked = [ask(leader, lambda t: UpdateWeights(t, folder), SLOW_REPLY_SECONDS) for leader in leaders]
            return await asyncio.gather(*asked)

        leaders = self._manager.leaders
        try:
            replies = await update(leaders, folder)
            refusal = next((reply for reply in replies if not reply.ok), None)
            if refusal is None:
                return replies[0]
            taken = [leader for leader, reply in zip(leaders, replies, strict=True) if reply.ok]
            same = all(reply.ok for reply in await update(taken, None))
        except RequestError:  # one does not answer in time
            same = len(leaders) == 1
            if same:
                raise
        if not same:
            self._manager.fail("the engines may have different weights, because one could not be updated")
            self.broken.set()
            raise RequestError(f"The engine has failed: {self._manager.failure}", status=503)
        return refusal

    def _forget_caches(self) -> None:
        for engine in range(len(self._manager.leaders)):
            self._balancer.flushed(engine)

    async def _ask_all(self, item: Callable[[int], ControlItem], timeout_s: float = REPLY_SECONDS) -> ControlReply:
        """Each engine's leader; the first reply that says no, if there is one."""
        if self._manager.failure is not None:
            raise RequestError(f"The engine has failed: {self._manager.failure}", status=503)
        replies = await asyncio.gather(
            *(self._manager.ask(leader, item, timeout_s) for leader in self._manager.leaders)
        )
        return next((reply for reply in replies if not reply.ok), replies[0])
