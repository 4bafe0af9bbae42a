"""Shared, main process: watches the ranks through the board, and tells why their group cannot go on.

Ranks that wait for each other inside a collective hear no signal and raise nothing; what they wrote to the board before
is all that can be known of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from srt.board import Board, Decision, Phase, Record

TICK_SECONDS = 0.25
APART_SECONDS = 3.0
"""How long ranks may stand still at different places. All at the same place are slow, not hung."""


class StoppedRanks:
    """Finds the ranks of this host that a signal has stopped. `pids` of these ranks, by rank."""

    def __init__(self, board: Board, pids: Mapping[int, int]) -> None:
        self._board = board
        self._pids = pids
        self._stopped: list[int] = []

    async def fault(self) -> str:
        """Returns once a rank is stopped, with the sentence that names it."""
        return await _first_of_ticks(self.tick)

    def tick(self) -> str | None:
        """To be called every TICK_SECONDS."""
        # Twice in a row: a shell that continues a whole job does not wake all its processes at once.
        before, self._stopped = self._stopped, [rank for rank, pid in self._pids.items() if is_stopped(pid)]
        for rank in self._stopped:
            if rank in before:
                return f"scheduler {rank} (pid {self._pids[rank]}) is stopped, in step {self._board.read(rank).step}"
        return None


class Watchdog:
    """`timeout` in seconds, for ranks that stand still at the same place; `pids` of the ranks of this host."""

    def __init__(self, board: Board, pids: Mapping[int, int], timeout: float) -> None:
        self._board = board
        self._stopped = StoppedRanks(board, pids)
        self._timeout = timeout
        self._places: list[tuple[int, Phase]] = []
        self._pids: list[int] = []
        self._still = 0.0  # seconds, counted in ticks: time in which this process was stopped too does not count

    async def fault(self) -> str:
        """Returns once a rank is stopped or hangs, with the sentence that names it."""
        return await _first_of_ticks(self.tick)

    def tick(self) -> str | None:
        """To be called every TICK_SECONDS."""
        records = read_all(self._board)
        self._pids = [record.pid for record in records]
        places = [(record.step, record.phase) for record in records]
        self._still = self._still + TICK_SECONDS if places == self._places else 0.0
        self._places = places
        stopped = self._stopped.tick()
        if stopped is not None:
            return stopped
        if self._still > APART_SECONDS and len(dict.fromkeys(places)) > 1:
            last, first = (pick(range(len(places)), key=self._progress) for pick in (min, max))
            return f"{self._name(last)} hangs {self._place(last)}, while {self._name(first)} is {self._place(first)}"
        if self._still > self._timeout:
            return f"{self._name(0)} has not moved for {self._timeout:g} s, {self._place(0)}, nor has any other rank"
        return None

    def _progress(self, rank: int) -> tuple[int, bool]:
        step, phase = self._places[rank]
        return step, phase == Phase.IDLE

    def _place(self, rank: int) -> str:
        step, phase = self._places[rank]
        return f"behind step {step}" if phase == Phase.IDLE else f"in step {step}"

    def _name(self, rank: int) -> str:
        return f"scheduler {rank} (pid {self._pids[rank]})"


async def stopped(title: str, pid: int) -> str:
    """Returns once a signal has stopped a process that is no rank, with the sentence that names it."""
    before = False
    while not ((now := is_stopped(pid)) and before):
        before = now
        await asyncio.sleep(TICK_SECONDS)
    return f"{title} (pid {pid}) is stopped"


async def _first_of_ticks(tick: Callable[[], str | None]) -> str:
    while True:
        fault = tick()
        if fault is not None:
            return fault
        await asyncio.sleep(TICK_SECONDS)


def read_all(board: Board) -> list[Record]:
    return [board.read(rank) for rank in range(board.num_ranks)]


def is_stopped(pid: int) -> bool:
    """By a signal; what a debugger holds may stand still as long as others may."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False  # it is gone, which is others' to tell


def difference(records: Sequence[Record]) -> str | None:
    """The first step on the board, and the first thing in it, that ranks decided otherwise; None if all agree."""
    chains = [{decision.step: decision for decision in record.recent} for record in records]
    common = [step for step in chains[0] if all(step in chain for chain in chains)]
    for step in common:
        decisions = [chain[step] for chain in chains]
        for name in (*Decision._fields[2:], "digest"):
            values = [getattr(decision, name) for decision in decisions]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                when = f"before step {step}" if name == "digest" else f"in step {step}, {name}"
                return f"scheduler {other} and scheduler 0 disagree {when}: {values[other]:x} and {values[0]:x}"
    return None


def first_failure(records: Sequence[Record]) -> str | None:
    """Of the ranks that failed, the one that was first: the others may only have lost their connection to it."""
    failed = [(record.heartbeat, rank) for rank, record in enumerate(records) if record.phase == Phase.FAILED]
    if not failed:
        return None
    _, rank = min(failed)
    return f"scheduler {rank} failed in step {records[rank].step}: {records[rank].failure}"


def table(records: Sequence[Record]) -> str:
    """The last steps of every rank, for the log."""
    lines = ["the last steps of every rank; numbers are hexadecimal:", f"rank phase {' '.join(Decision._fields)}"]
    for rank, record in enumerate(records):
        for decision in record.recent:
            lines.append(" ".join((f"{rank} {record.phase.name}", *(f"{value:x}" for value in decision))))
    return "\n".join(lines)
