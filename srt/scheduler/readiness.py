"""L2, leader: which grammars every rank is done with, as the board shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from srt.board import Board
from srt.messages import GrammarReady


class Compiling(Protocol):
    @property
    def compiling(self) -> Sequence[int]:
        """Serials of the grammars that were begun and not announced."""


class GrammarReadiness:
    """Announces each grammar once: what is announced is begun no longer."""

    def __init__(self, board: Board, grammars: Compiling) -> None:
        self._board = board
        self._grammars = grammars

    @property
    def awaited(self) -> bool:
        return bool(self._grammars.compiling)

    def take(self) -> list[GrammarReady]:
        board = self._board
        return [
            GrammarReady(serial)
            for serial in self._grammars.compiling
            if all(board.has_grammar(rank, serial) for rank in range(board.num_ranks))
        ]
