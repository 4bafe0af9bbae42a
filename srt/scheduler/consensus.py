"""L2, each rank: what the rank decided in each step, on the board for all to compare.

The ledger is a pure function of the configuration, the ordered inboxes and the sampled tokens; so two ranks whose
digests are equal have decided alike up to that step, and the first step at which they differ is where to look.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from zlib import crc32

import numpy as np

from radix import Ledger
from srt.board import Decision
from srt.messages import Inbox
from srt.scheduler.interfaces import Record
from srt.scheduler.output import Output
from srt.scheduler.planner import Plan, Planner

_INBOX = struct.Struct("<Qd")
_CHAIN = struct.Struct("<8Q")


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
            _checksum(_INBOX.pack(inbox.number, inbox.now), *inbox.items),
            _checksum(self._output.take_committed()),
            self._planner.retractions,
            self._ledger.evicted_total,
            self._ledger.free_tokens,
            _checksum(batch.row, batch.start, batch.length, batch.draft) if batch else 0,
            _checksum(batch.slots, *(batch.copies or ())) if batch else 0,
        )
        chained = blake2b(_CHAIN.pack(self._digest, *fields), digest_size=8)
        self._digest = int.from_bytes(chained.digest(), "little")
        self._record.step(Decision(inbox.number, self._digest, *fields))


def _checksum(*parts: bytes | np.ndarray) -> int:
    """CRC-32: quicker than a hash that withstands malice, which ranks do not bear each other."""
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return checksum
