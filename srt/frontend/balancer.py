"""L1, frontend: the seam behind which it is chosen which of several engines serves a request."""

from __future__ import annotations

from typing import Protocol

from srt.messages import Ids


class Assignment(Protocol):
    """Where a generation runs."""

    @property
    def engine(self) -> int: ...


class Balancer(Protocol):
    """Hears of all that engines are asked and answer, in token ids. No method may block."""

    def assign(self, namespace: bytes, ids: Ids) -> Assignment:
        """Chooses the engine for a prompt, whose load it is from here on."""

    def heard(self, assignment: Assignment, ids: Ids) -> None:
        """The engine has generated these tokens."""

    def ended(self, assignment: Assignment) -> None:
        """The generation is over, or nobody waits for it any more."""

    def flushed(self, engine: int) -> None:
        """The engine has forgotten its cached prefixes."""
