"""Shared: the board, a file in shared memory on which every scheduler process keeps one record of how it is doing.

Only the rank itself writes its record; the main process reads them all, also when a rank hangs or has died. A record
carries a heartbeat, what the rank is doing, the ledger's gauges, and the digests of its last steps, written before
the step's first collective. A checksum tells a reader who came in the middle of a write to look again.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from enum import IntEnum

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
)
RING = 32


class Phase(IntEnum):
    STARTING = 0
    IDLE = 1
    RUNNING = 2
    STOPPED = 3


_CHECKSUM = struct.Struct("<Q")  # CRC-32 of all that follows
_HEAD = struct.Struct("<QQdQQ")  # pid, phase, heartbeat, step, digest
_GAUGES = struct.Struct(f"<{len(GAUGES)}Q")
_STEP = struct.Struct("<QQ")  # step, digest
_GAUGES_AT = _HEAD.size
_RING_AT = _GAUGES_AT + _GAUGES.size
_BODY = _RING_AT + RING * _STEP.size
_RECORD = _CHECKSUM.size + _BODY
_READ_ATTEMPTS = 20


@dataclass(frozen=True)
class Record:
    pid: int
    phase: Phase
    heartbeat: float  # CLOCK_MONOTONIC in seconds, one clock for all processes of a host
    step: int
    digest: int  # of everything decided up to `step`
    gauges: dict[str, int]
    recent: tuple[tuple[int, int], ...]  # (step, digest), oldest first


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
            file.write(_seal(bytes(_BODY)) * num_ranks)
        return cls(path, num_ranks)

    def read(self, rank: int) -> Record:
        """The rank's record as it is now; if its writer died in the middle of a write, the last one that was read."""
        for _ in range(_READ_ATTEMPTS):
            raw = self._map[rank * _RECORD : (rank + 1) * _RECORD]
            if raw == _seal(raw[_CHECKSUM.size :]):
                self._last[rank] = raw
                break
            time.sleep(0.0001)
        body = self._last[rank][_CHECKSUM.size :]
        pid, phase, heartbeat, step, digest = _HEAD.unpack_from(body)
        gauges = dict(zip(GAUGES, _GAUGES.unpack_from(body, _GAUGES_AT), strict=True))
        recent = sorted(entry for entry in _STEP.iter_unpack(body[_RING_AT:]) if entry[0])
        return Record(pid, Phase(phase), heartbeat, step, digest, gauges, tuple(recent))

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
        self._write()

    def beat(self, phase: Phase) -> None:
        self._phase = phase
        self._write()

    def step(self, step: int, digest: int) -> None:
        """Steps count from 1; digests are 64 bits wide."""
        self._phase, self._step, self._digest = Phase.RUNNING, step, digest
        _STEP.pack_into(self._body, _RING_AT + step % RING * _STEP.size, step, digest)
        self._write()

    def gauges(self, **values: int) -> None:
        """All of GAUGES, by name."""
        _GAUGES.pack_into(self._body, _GAUGES_AT, *map(values.__getitem__, GAUGES))
        self._write()

    def _write(self) -> None:
        _HEAD.pack_into(self._body, 0, self._pid, self._phase, time.monotonic(), self._step, self._digest)
        self._map[self._base : self._base + _RECORD] = _seal(self._body)


def _seal(body: bytes | bytearray) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(body)) + body
