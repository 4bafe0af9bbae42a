"""Shared, main process: one of the engines behind a door, as launch sees it; requests are shared out between them.

Owns what its ranks' processes are told apart by, and how a fault of one of them is put into words.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from srt.board import Board
from srt.config import ServerConfig
from srt.model_files import ModelFiles
from srt.process import Child, ChildSpec, HttpShare
from srt.transport import Endpoints, Meeting
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

    async def start_ranks(
        self, config: ServerConfig, files: ModelFiles, door: str, children: list[Child], meeting: Meeting | None = None
    ) -> None:
        """Those of this host; they are among `children`, all of this process, as soon as they are there."""
        for rank in config.node_ranks:
            title = f"{self.prefix}scheduler {rank}"
            child = await Child.start(door, child_spec(title, rank, config, self.endpoints, files, meeting))
            self.schedulers.append(child)
            children.append(child)

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


def child_spec(
    title: str,
    rank: int,
    config: ServerConfig,
    endpoints: Endpoints,
    files: ModelFiles,
    meeting: Meeting | None = None,
    http: HttpShare | None = None,
) -> ChildSpec:
    return ChildSpec(
        title=title,
        rank=rank,
        config=config,
        endpoints=endpoints,
        model=files.model_config,
        folder=str(files.folder),
        tokenizer_folder=str(files.tokenizer_folder),
        weights=files.weights,
        gguf_path=None if files.gguf_path is None else str(files.gguf_path),
        meeting=meeting,
        http=http,
    )
