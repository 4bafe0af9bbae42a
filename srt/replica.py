"""Shared, main process: one of the engines behind a door, as launch sees it; requests are shared out between them.

Owns what its ranks' processes are told apart by, and how a fault of one of them is put into words.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from srt.board import Board
from srt.config import ServerConfig
from srt.process import Child
from srt.transport import Endpoints
from srt.watchdog import Watchdog, difference, first_failure, read_all, table

log = logging.getLogger(__name__)


@dataclass
class Replica:
    """Ranks that share a model, and where they are met."""

    endpoints: Endpoints
    board: Board
    prefix: str  # of what is said of it; empty if it is the only one
    schedulers: list[Child] = field(default_factory=list)  # of this host, by rank

    @classmethod
    def create(cls, config: ServerConfig, endpoints: Endpoints) -> Replica:
        """Without its processes."""
        prefix = f"engine {endpoints.dp_rank} " if config.dp_size > 1 else ""
        return cls(endpoints, Board.create(endpoints.board, config.tp_size), prefix)

    def pids(self, config: ServerConfig) -> Mapping[int, int]:
        """Of the ranks of this host, by rank."""
        return dict(zip(config.node_ranks, (child.pid for child in self.schedulers), strict=True))

    async def fault(self, config: ServerConfig) -> str:
        """Returns once a rank is stopped or hangs, with the sentence that names it."""
        return self.prefix + await Watchdog(self.board, self.pids(config), config.watchdog_timeout).fault()

    def findings(self) -> tuple[list[str], list[str]]:
        """What the board says of ranks that disagree, and of ranks that failed; all their last steps go to the log."""
        records = read_all(self.board)
        if len(records) > 1:
            log.error("%s%s", self.prefix, table(records))
        return self._say(difference(records)), self._say(first_failure(records))

    def _say(self, sentence: str | None) -> list[str]:
        return [] if sentence is None else [self.prefix + sentence]
