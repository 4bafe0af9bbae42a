"""Shared: the board, a file in shared memory on which every scheduler process keeps one record of how it is doing.

Only the rank itself writes its record; the main process reads them all, also when a rank hangs or has died. A record
carries a heartbeat, what the rank is doing, the ledger's gauges, and the digests of its last steps, written before
the step's first collective. A version number that is odd while a write goes on tells a reader to look again.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
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


_HEAD = struct.Struct("<QQQdQQ")  # version, pid, phase, heartbeat, step, digest
_GAUGES = struct.Struct(f"<{len(GAUGES)}Q")
_STEP = struct.Struct("<QQ")  # step, digest
_HEAD_SIZE, _GAUGES_SIZE = 64, 256
_RECORD = _HEAD_SIZE + _GAUGES_SIZE + RING * _STEP.size


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
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, num_ranks * _RECORD)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: str, num_ranks: int) -> Board:
        with open(path, "xb") as file:
            file.truncate(num_ranks * _RECORD)
        return cls(path, num_ranks)

    def read(self, rank: int) -> Record:
        base = rank * _RECORD
        for attempt in range(1000):
            raw = self._map[base : base + _RECORD]
            version, pid, phase, heartbeat, step, digest = _HEAD.unpack_from(raw)
            if version % 2 == 0 and struct.unpack_from("<Q", self._map, base)[0] == version:
                break
            if attempt > 10:
                time.sleep(0.0001)
        gauges = dict(zip(GAUGES, _GAUGES.unpack_from(raw, _HEAD_SIZE), strict=True))
        ring = _HEAD_SIZE + _GAUGES_SIZE
        recent = sorted(
            entry for entry in (_STEP.unpack_from(raw, ring + i * _STEP.size) for i in range(RING)) if entry[0]
        )
        return Record(pid, Phase(phase), heartbeat, step, digest, gauges, tuple(recent))

    def close(self) -> None:
        self._map.close()


class RankRecord:
    """The writing end of one rank's record."""

    def __init__(self, board: Board, rank: int) -> None:
        self._map = board._map
        self._base = rank * _RECORD
        self._version = 0
        self._pid = os.getpid()
        self._phase = Phase.STARTING
        self._step = self._digest = 0
        self._gauges = (0,) * len(GAUGES)
        self._write()

    def beat(self, phase: Phase) -> None:
        self._phase = phase
        self._write()

    def step(self, step: int, digest: int) -> None:
        """Steps count from 1; digests are 64 bits wide."""
        self._phase, self._step, self._digest = Phase.RUNNING, step, digest
        _STEP.pack_into(self._map, self._base + _HEAD_SIZE + _GAUGES_SIZE + step % RING * _STEP.size, step, digest)
        self._write()

    def gauges(self, **values: int) -> None:
        """All of GAUGES, by name."""
        self._gauges = tuple(map(values.__getitem__, GAUGES))
        self._write()

    def _write(self) -> None:
        self._version += 1
        struct.pack_into("<Q", self._map, self._base, self._version)
        _GAUGES.pack_into(self._map, self._base + _HEAD_SIZE, *self._gauges)
        self._version += 1
        now = time.monotonic()
        _HEAD.pack_into(self._map, self._base, self._version, self._pid, self._phase, now, self._step, self._digest)
