"""L2, each rank: what the rank decided in each step, on the board for all to compare.

The ledger is a pure function of the configuration, the ordered inboxes and the sampled tokens; so two ranks whose
digests are equal have decided alike up to that step, and the first step at which they differ is where to look.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from radix import Ledger
from srt.board import Decision
from srt.messages import Inbox
from srt.scheduler.interfaces import Record
from srt.scheduler.output import Output
from srt.scheduler.planner import Plan, Planner

_INBOX = struct.Struct("<Qd")


class BoardConsensus:
    """Writes inbox n, plan n, and how the ledger stands before it, all the tokens up to step n - 1 in it."""

    def __init__(self, record: Record, planner: Planner, output: Output, ledger: Ledger) -> None:
        self._record = record
        self._planner = planner
        self._output = output
        self._ledger = ledger
        self._digest = 0

    def step(self, inbox: Inbox, plan: Plan | None) -> None:
        batch = plan.batch if plan else None
        fields = (
            _hash(_INBOX.pack(inbox.number, inbox.now), *inbox.items),
            _hash(self._output.take_committed()),
            self._planner.retractions,
            self._ledger.evicted_total,
            self._ledger.free_tokens,
            _hash(batch.row, batch.start, batch.length) if batch else 0,
            _hash(batch.slots) if batch else 0,
        )
        self._digest = _hash(struct.pack(f"<Q{len(fields)}Q", self._digest, *fields))
        self._record.step(Decision(inbox.number, self._digest, *fields))


def _hash(*parts: object) -> int:
    """64 bits of BLAKE2b. `parts` are bytes or arrays."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")
