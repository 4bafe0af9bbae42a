"""L2, each rank: how much of the pool running requests leave to prefixes that nobody uses, while others wait.

Owns the measure of what such prefixes save. Without a share of their own they are what is left over: where many want to
run there is nothing left, a chat's history is evicted between two of its turns, and is computed again in every one.
"""

from __future__ import annotations

STEP_TOKENS = 256
"""A step costs about as much as computing so many tokens does, however few it computes: the weights are read. On a GPU
it is the ratio of its arithmetic to its memory bandwidth; with more, decoding in small batches would look cheap."""

SHARE_PER_SAVING, MOST = 1.5, 0.75


class CacheShare:
    """Grows with the share of the work that cached prefixes save: where they save none requests get all memory.

    Only what nobody was using counts as saved: what running requests share is there anyway. All counts decay, so that
    what was done for a pool's worth of tokens ago hardly matters.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._saved = 0.0
        self._work = 0.0  # done or saved

    def step(self) -> None:
        self._count(0, STEP_TOKENS)

    def admitted(self, revived: int, computed: int) -> None:
        """A prompt found `revived` tokens that nobody was using, and computes `computed`."""
        self._count(revived, computed)

    def spares(self, available: int) -> bool:
        """Whether another request may run where `available` tokens are free or in nobody's use."""
        if self._saved == 0:
            return True
        share = min(MOST, SHARE_PER_SAVING * self._saved / self._work)
        return available >= share * self._capacity

    def _count(self, saved: int, done: int) -> None:
        keep = max(0.0, 1 - (saved + done) / self._capacity)
        self._saved = self._saved * keep + saved
        self._work = self._work * keep + saved + done
