"""L1, main process: a line in the log every few seconds in which something was served."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from srt.board import Board
from srt.frontend.metrics import Load, Metrics

log = logging.getLogger(__name__)

SECONDS = 5.0


class StepLog:
    def __init__(self, boards: Sequence[Board], metrics: Metrics) -> None:
        self._boards = boards
        self._metrics = metrics
        self._last = 0.0  # when it was looked
        self._generated = [0] * len(boards)

    def tick(self, now: float) -> None:
        seconds = now - self._last
        if seconds < SECONDS:
            return
        self._last = now
        for engine, board in enumerate(self._boards):
            load, rates = Load.of(board), self._metrics.engines[engine]
            generated, self._generated[engine] = rates.total - self._generated[engine], rates.total
            if load.running or load.waiting or generated:
                self._log(engine, load, generated / seconds, rates.cache_hit_rate)

    def _log(self, engine: int, load: Load, rate: float, hit_rate: float) -> None:
        whose = f"engine {engine}: " if len(self._boards) > 1 else ""
        fields = {
            "dp_rank": engine,
            "running": load.running,
            "waiting": load.waiting,
            "kv_used_tokens": load.used,
            "kv_total_tokens": load.total,
            "kv_usage": round(load.token_usage, 4),
            "cache_hit_rate": round(hit_rate, 4),
            "tokens_per_second": round(rate, 1),
        }
        log.info(
            "%srunning %d, waiting %d, %d of %d tokens in use (%.1f %%), hit rate %.2f, %.1f tokens/s",
            *(whose, load.running, load.waiting, load.used, load.total, 100 * load.token_usage, hit_rate, rate),
            extra={"fields": fields},
        )
