"""L2, each rank: where results go. Only the leader's leave, and only what all ranks are seen to agree on."""

from __future__ import annotations

import time

import msgspec

from srt.board import Board, decision_in
from srt.messages import Reply, TokenBatch
from srt.scheduler.interfaces import Outlet
from srt.transport import Sender

SPINS, NAP_SECONDS = 100, 50e-6
"""How often the leader looks for a slower rank's decision before it lets go of its core, and for how long it does."""


class Disagreement(Exception):
    """A rank has decided otherwise than the leader."""


class ZmqOutlet:
    """Tokens to the detokenizer, replies straight to the frontend."""

    holds = False

    def __init__(self, detokenizer: Sender, frontend: Sender) -> None:
        self._detokenizer = detokenizer
        self._frontend = frontend

    def tokens(self, batch: TokenBatch) -> None:
        if batch.deltas:
            self._detokenizer.send(msgspec.structs.replace(batch, released=time.monotonic()))

    def reply(self, message: Reply) -> None:
        self._frontend.send(message)

    def release(self, step: int) -> None:
        pass


class AgreedOutlet:
    """The leader's, beside followers: holds what a step gave until all ranks' decisions of the next step are equal.

    A decision has the tokens of the step before in it, so no token leaves that another rank has not computed too.
    """

    def __init__(self, inner: Outlet, board: Board) -> None:
        self._inner = inner
        self._board = board
        self._held: list[TokenBatch | Reply] = []

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def tokens(self, batch: TokenBatch) -> None:
        if batch.deltas:
            self._held.append(batch)

    def reply(self, message: Reply) -> None:
        self._held.append(message)

    def release(self, step: int) -> None:
        """Waits for a slower rank as the step's first collective would; the main process sees to one that hangs."""
        self._compare(step)
        for message in self._held:
            if isinstance(message, TokenBatch):
                self._inner.tokens(message)
            else:
                self._inner.reply(message)
        self._held.clear()

    def _compare(self, step: int) -> None:
        board = self._board
        own = board.entry(0, step)
        for rank in range(1, board.num_ranks):
            spins = 0
            while (entry := board.entry(rank, step)) != own:
                decision = decision_in(entry)
                if decision is not None and decision.step == step:
                    raise Disagreement(f"rank {rank} decided otherwise than rank 0 in step {step}")
                spins += 1
                if spins > SPINS:
                    time.sleep(NAP_SECONDS)


class SilentOutlet:
    """A follower's."""

    holds = False

    def tokens(self, batch: TokenBatch) -> None:
        pass

    def reply(self, message: Reply) -> None:
        pass

    def release(self, step: int) -> None:
        pass
