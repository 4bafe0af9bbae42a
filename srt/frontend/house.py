"""L1, main process: what it says to the HTTP workers, and asks them. Without workers there is nobody to ask.

State of the whole server is the main process's alone, so a worker hands on what reads or changes it (`forwarding.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from srt.frontend.metrics import Counts, Metrics
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.messages import AbortNamed, ConfigureLogging, EngineFailed, Order, ShowWorker, UseWeights, WorkerReply
from srt.transport import Sender


class House:
    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._workers: Sequence[Sender] = ()
        self._counts = msgspec.msgpack.Decoder(Counts)
        self.requests: list[list[Any]] = []  # on their way in workers, as the live page has them, when last asked

    def admit(self, workers: Sequence[Sender]) -> None:
        """They speak HTTP from now on."""
        self._workers = workers

    async def abort(self, name: str | None, message: str) -> None:
        """All requests whose name begins with `name`; None aborts all. Once it returns the engines are told."""
        self._manager.abort(name, message)
        await self._ask(lambda ticket: AbortNamed(ticket, name, message))

    async def use_weights(self, path: str, version: str) -> None:
        await self._ask(lambda ticket: UseWeights(ticket, path, version))

    async def configure_logging(self, level: str | None, requests: bool | None, requests_level: int | None) -> None:
        await self._ask(lambda ticket: ConfigureLogging(ticket, level, requests, requests_level))

    async def count(self) -> None:
        """Brings what the workers count, and who is on his way there, up to date. RequestError if one hangs."""
        replies = await self._ask(ShowWorker)
        self._metrics.add([self._counts.decode(reply.counts) for reply in replies])
        self.requests = [row for reply in replies for row in msgspec.json.decode(reply.requests)]

    def fail(self, reason: str) -> None:
        for worker in self._workers:
            worker.send(EngineFailed(reason))

    async def _ask(self, order: Callable[[int], Order]) -> list[WorkerReply]:
        asked = [
            self._manager.ask(worker, order, name=f"HTTP worker {number}")
            for number, worker in enumerate(self._workers, 1)
        ]
        return await asyncio.gather(*asked)
