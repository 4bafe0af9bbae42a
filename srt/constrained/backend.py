"""L4's CPU side, each rank: what a grammar library must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Where one output stands in its grammar. Never raises: what goes wrong is a state, and final."""

    def accept(self, token: int) -> None: ...

    def look_ahead(self, token: int) -> bool:
        """Accepts a token that may be allowed; if it is not, says so and changes nothing."""

    def look_back(self, count: int) -> None:
        """Takes the last `count` tokens back that were looked ahead at."""

    def forced(self, most: int) -> tuple[Sequence[int], int]:
        """Tokens, at most so many, of a text that the grammar leaves no choice about; and how many of these alone are
        allowed, where other tokens may spell the others' text too."""

    @property
    def ended(self) -> bool:
        """Whether nothing but EOS may follow."""

    @property
    def fault(self) -> str:
        """Why the output cannot go on; empty while it can."""


class Compiled(Protocol):
    def matcher(self) -> Matcher:
        """One for each output."""


class Backend(Protocol):
    """Made from a Vocabulary."""

    def compile(self, text: str) -> Compiled:
        """Any thread may call it. GrammarError if it is no grammar or too large a one."""

    def fill(self, matchers: Sequence[Matcher], bits_MW: np.ndarray) -> None:
        """Sets bit t % 32 of word t // 32 of row m where matcher m allows token t, and clears the others."""
