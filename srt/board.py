"""Shared: the board, a file in shared memory on which every scheduler process keeps one record of how it is doing.

Only the rank itself writes its record; rank 0 and the main process read them all, also when a rank hangs or has died. A
record carries a heartbeat, what the rank is doing, the ledger's gauges, why it failed, and what it decided in its last
steps, each written before the step's first collective; and which grammars it is done with. Checksums tell a reader who
came in the middle of a write.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

GAUGES = (
    "running",
    "waiting",
    "pool_total",  # tokens, as all pool_*
    "pool_free",
    "pool_cached",
    "pool_locked",  # cached and in use by a running request
    "waiting_tokens",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generated_tokens_total",
    "evicted_tokens_total",
    "retractions_total",
    "finished_total",
    "aborted_total",
    "drafts_total",
    "drafted_tokens_total",
    "accepted_draft_tokens_total",
    "host_total",  # tokens, as host_used
    "host_used",
    "saved_tokens_total",  # to host memory
    "restored_tokens_total",  # from there
)
RING = 32
GRAMMARS = 64
"""How far the serials of grammars that are compiled at the same time may lie apart."""


class Phase(IntEnum):
    STARTING = 0
    IDLE = 1  # behind its step, until there is another inbox
    RUNNING = 2  # in its step
    STOPPED = 3
    FAILED = 4


class Decision(NamedTuple):
    """What a rank decided in one step, in the order of cause and effect. 64 bits each; hashes of what is longer."""

    step: int  # the number of its inbox, from 1
    digest: int  # of all that follows, in this step and in all before it
    inbox: int
    tokens: int  # committed since the step before
    retracted: int  # requests, since the start
    evicted: int  # tokens, since the start
    free: int  # tokens of the pool
    rows: int  # which rows the plan computes, and which of their positions
    slots: int  # where the K/V of these goes, and what is copied before


_CHECKSUM = struct.Struct("<Q")  # CRC-32 of all that follows
_HEAD = struct.Struct("<QQdQQ")  # pid, phase, heartbeat, step, digest
_HEARTBEAT, _HEARTBEAT_AT = struct.Struct("<d"), 16
_GAUGES = struct.Struct(f"<{len(GAUGES)}Q")
_DECISION = struct.Struct(f"<{len(Decision._fields)}Q")
_FAILURE = 400  # bytes of UTF-8 that say why the rank failed
_GAUGES_AT = _HEAD.size
_FAILURE_AT = _GAUGES_AT + _GAUGES.size
_BODY = _FAILURE_AT + _FAILURE
_ENTRY = _CHECKSUM.size + _DECISION.size
_RING_AT = _CHECKSUM.size + _BODY
_GRAMMAR = struct.Struct("<II")  # a serial, twice: half a write is no serial
_GRAMMARS_AT = _RING_AT + RING * _ENTRY
_RECORD = _GRAMMARS_AT + GRAMMARS * _GRAMMAR.size
_READ_ATTEMPTS = 20

RECORD_BYTES = _RECORD


@dataclass(frozen=True)
class Record:
    pid: int
    phase: Phase
    heartbeat: float  # CLOCK_MONOTONIC of this host in seconds; of a rank elsewhere, when the news of it came
    step: int
    digest: int  # of everything decided up to `step`
    gauges: dict[str, int]
    failure: str  # why the rank failed; empty if it did not
    recent: tuple[Decision, ...]  # oldest first


class Board:
    """`num_ranks` records in the file at `path`, which `create` makes."""

    def __init__(self, path: str, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._last = [_seal(bytes(_BODY))] * num_ranks
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, num_ranks * _RECORD)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: str, num_ranks: int) -> Board:
        with open(path, "xb") as file:
            file.write((_seal(bytes(_BODY)) + bytes(_RECORD - _RING_AT)) * num_ranks)
        return cls(path, num_ranks)

    def read(self, rank: int) -> Record:
        """The rank's record as it is now; if its writer died in the middle of a write, the last one that was read."""
        base = rank * _RECORD
        for _ in range(_READ_ATTEMPTS):
            raw = self._map[base : base + _RING_AT]
            if _is_whole(raw):
                self._last[rank] = raw
                break
            time.sleep(0.0001)
        body = self._last[rank][_CHECKSUM.size :]
        pid, phase, heartbeat, step, digest = _HEAD.unpack_from(body)
        gauges = dict(zip(GAUGES, _GAUGES.unpack_from(body, _GAUGES_AT), strict=True))
        failure = body[_FAILURE_AT:].rstrip(b"\0").decode(errors="ignore")
        decisions = (decision_in(self.entry(rank, step)) for step in range(RING))
        recent = sorted(decision for decision in decisions if decision is not None)
        return Record(pid, Phase(phase), heartbeat, step, digest, gauges, failure, tuple(recent))

    def entry(self, rank: int, step: int) -> bytes:
        """What the rank has written where its decision of this step belongs: see `decision_in`."""
        at = rank * _RECORD + _RING_AT + step % RING * _ENTRY
        return self._map[at : at + _ENTRY]

    def put(self, rank: int, at: int, data: bytes) -> None:
        """Writes to the record of a rank elsewhere what that one has written to its own, at the same place in it."""
        if at == 0:
            body = bytearray(data[_CHECKSUM.size :])
            _HEARTBEAT.pack_into(body, _HEARTBEAT_AT, time.monotonic())  # clocks of hosts have nothing in common
            data = _seal(body)
        base = rank * _RECORD
        self._map[base + at : base + at + len(data)] = data

    def has_grammar(self, rank: int, serial: int) -> bool:
        """Whether the rank is done with this grammar. A serial GRAMMARS later takes its place."""
        at = rank * _RECORD + _GRAMMARS_AT + serial % GRAMMARS * _GRAMMAR.size
        return _GRAMMAR.unpack(self._map[at : at + _GRAMMAR.size]) == (serial, serial)

    def close(self) -> None:
        self._map.close()


class RankRecord:
    """The writing end of one rank's record."""

    def __init__(self, board: Board, rank: int) -> None:
        self._map = board._map
        self._base = rank * _RECORD
        self._body = bytearray(_BODY)
        self._pid = os.getpid()
        self._phase = Phase.STARTING
        self._step = self._digest = 0
        self._mirror: Callable[[int, bytes, bool], None] | None = None
        self._mirroring = threading.Lock()
        self._write()

    def mirror(self, write: Callable[[int, bytes, bool], None]) -> None:
        """From now on `write` is given where in the record something is written, what (see `Board.put`), and whether
        more follows at once."""
        self._mirror = write
        self._write()

    def beat(self, phase: Phase) -> None:
        self._phase = phase
        self._write()

    def step(self, decision: Decision) -> None:
        self._phase, self._step, self._digest = Phase.RUNNING, decision.step, decision.digest
        self._put(_RING_AT + decision.step % RING * _ENTRY, _seal(_DECISION.pack(*decision)), more=True)
        self._write()

    def gauges(self, **values: int) -> None:
        """All of GAUGES, by name, once the step is over."""
        self._phase = Phase.IDLE
        _GAUGES.pack_into(self._body, _GAUGES_AT, *map(values.__getitem__, GAUGES))
        self._write()

    def grammar(self, serial: int) -> None:
        """This rank is done with the grammar; any thread may say so. Serials begin at 1."""
        self._put(_GRAMMARS_AT + serial % GRAMMARS * _GRAMMAR.size, _GRAMMAR.pack(serial, serial))

    def fail(self, reason: str) -> None:
        """The rank's last words: its heartbeat stays at the moment of the failure."""
        self._body[_FAILURE_AT:] = reason.encode(errors="replace")[:_FAILURE].ljust(_FAILURE, b"\0")
        self.beat(Phase.FAILED)

    def _write(self) -> None:
        _HEAD.pack_into(self._body, 0, self._pid, self._phase, time.monotonic(), self._step, self._digest)
        self._put(0, _seal(self._body))

    def _put(self, at: int, data: bytes, more: bool = False) -> None:
        self._map[self._base + at : self._base + at + len(data)] = data
        if self._mirror is not None:
            with self._mirroring:
                self._mirror(at, data, more)


def decision_in(entry: bytes) -> Decision | None:
    """None if nothing is there yet, or half of something."""
    if not _is_whole(entry):
        return None
    decision = Decision(*_DECISION.unpack_from(entry, _CHECKSUM.size))
    return decision if decision.step else None


def _seal(body: bytes | bytearray) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def _is_whole(raw: bytes) -> bool:
    return raw[: _CHECKSUM.size] == _CHECKSUM.pack(zlib.crc32(memoryview(raw)[_CHECKSUM.size :]))
