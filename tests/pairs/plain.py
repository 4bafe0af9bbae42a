"""What all features are made of, and what they agree on."""

from __future__ import annotations

from pairs.reference import Ask, Reference
from pairs.trial import Trial

TOLERANCE = 1e-3
"""Of log-probabilities."""
FOR_EVER = 1000
"""Tokens of a request that will be taken away."""
NUMBERS = r"([0-9]{2}[,;]){4,8}"
NUMBERS_FOR_EVER = r"([0-9]{2}[,;])+"


class Plain:
    """What a feature does that does nothing."""

    flags: tuple[str, ...] = ()
    needs_queue = False

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        return ask

    def prepare(self, trial: Trial) -> None:
        pass

    def send_beside(self, trial: Trial) -> None:
        pass

    def meanwhile(self, trial: Trial) -> None:
        pass

    def check(self, trial: Trial) -> None:
        pass


def if_it_counts(before: Ask, after: Ask, reference: Reference) -> Ask | None:
    """`after`, if it has another answer."""
    texts = [[choice.tokens for choice in reference.choices(ask)] for ask in (before, after)]
    return after if texts[0] != texts[1] else None
