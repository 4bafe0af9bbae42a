"""L2, leader: dates what its scheduler does, on what leaves. Decides nothing, so followers need none.

Stands around the executor, whose calls say when a step is planned, launched and done, and around the outlet.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from srt.messages import Reply, TokenBatch, TokenDelta
from srt.scheduler.interfaces import Executor, Outlet
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks


class Stopwatch:
    """Executor and outlet of one scheduler. Owns when each live request was admitted and first launched."""

    def __init__(self, executor: Executor, outlet: Outlet) -> None:
        self._executor = executor
        self._outlet = outlet
        self._starts: dict[int, tuple[float, float]] = {}  # by rid
        self._computed = 0.0

    # ---- the executor's -------------------------------------------------------------------------------------------

    def forward(self, batch: ScheduleBatch) -> Any:
        if not batch.opened:
            return self._executor.forward(batch)
        admitted = time.monotonic()
        launched = self._executor.forward(batch)
        now = time.monotonic()
        for row in batch.opened:
            self._starts.setdefault(row.rid, (admitted, now))  # one that was retracted had its start before
        return launched

    def sample(self, launched: Any, masks: TokenMasks | None) -> None:
        self._executor.sample(launched, masks)

    def result(self, launched: Any) -> StepResult:
        result = self._executor.result(launched)
        self._computed = time.monotonic()
        return result

    # ---- the outlet's ---------------------------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        return self._outlet.holds

    def tokens(self, batch: TokenBatch) -> None:
        deltas = batch.deltas
        if any([delta.opening is not None or delta.finish is not None for delta in deltas]):
            deltas = tuple(map(self._dated, deltas))
        self._outlet.tokens(TokenBatch(batch.step, deltas, self._computed))

    def reply(self, message: Reply) -> None:
        self._outlet.reply(message)

    def release(self, step: int) -> None:
        self._outlet.release(step)

    def _dated(self, delta: TokenDelta) -> TokenDelta:
        starts = self._starts
        if delta.opening is not None and delta.rid in starts:
            admitted, launched = starts[delta.rid]
            started = replace(delta.opening.started, admitted=admitted, launched=launched)
            delta = replace(delta, opening=replace(delta.opening, started=started))
        if delta.finish is not None:
            starts.pop(delta.rid, None)
        return delta
