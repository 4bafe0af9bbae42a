"""L2, each rank: a running digest of everything the rank decided, on the board for all to compare.

The ledger is a pure function of the configuration, the ordered inboxes and the sampled tokens; so two ranks whose
digests are equal have decided alike up to that step, and the first step at which they differ is where to look.
"""

from __future__ import annotations

import hashlib

from radix import Ledger
from srt.board import RankRecord
from srt.messages import Inbox
from srt.scheduler.output import Output
from srt.scheduler.planner import Plan, Planner


class BoardConsensus:
    """Digest of (inbox n, plan n, free count, evictions, retractions, tokens n - 1), chained from step to step."""

    def __init__(self, record: RankRecord, planner: Planner, output: Output, ledger: Ledger) -> None:
        self._record = record
        self._planner = planner
        self._output = output
        self._ledger = ledger
        self._digest = 0

    def step(self, inbox: Inbox, plan: Plan | None) -> None:
        ledger = self._ledger
        numbers = (self._digest, inbox.number, ledger.free_tokens, ledger.evicted_total, self._planner.retractions)
        state = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
        for item in inbox.items:
            state.update(item)
        state.update(self._output.take_committed())
        if plan is not None:
            batch = plan.batch
            for column in (batch.row, batch.start, batch.length, batch.slots):
                state.update(column)
        self._digest = int.from_bytes(state.digest(), "little")
        self._record.step(inbox.number, self._digest)
