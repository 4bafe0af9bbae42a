"""What the main process makes of the board: who hangs, who failed first, and where ranks began to differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from srt.board import GAUGES, RING, Board, Decision, RankRecord
from srt.watchdog import (
    APART_SECONDS,
    TICK_SECONDS,
    Watchdog,
    difference,
    first_failure,
    is_stopped,
    read_all,
    table,
)

TICKS_APART = int(APART_SECONDS / TICK_SECONDS)


def decision(step, **changes):
    digest = 1000 + step + 7 * len(changes)
    return Decision(step, digest, *range(step, step + 7))._replace(**changes)


@pytest.fixture
def board(tmp_path):
    board = Board.create(str(tmp_path / "board"), 3)
    yield board
    board.close()


@pytest.fixture
def records(board):
    return [RankRecord(board, rank) for rank in range(3)]


def watch(board, timeout=60.0):
    return Watchdog(board, dict.fromkeys(range(3), os.getpid()), timeout)


def test_equal_ranks_do_not_differ(board, records):
    assert difference(read_all(board)) is None
    for step in range(1, RING + 9):
        for record in records:
            record.step(decision(step))
    records[0].step(decision(RING + 9))  # the others have not come so far
    assert difference(read_all(board)) is None


@pytest.mark.parametrize("field", Decision._fields[2:])
def test_the_first_difference_is_named(board, records, field):
    for step in range(1, 9):
        for rank, record in enumerate(records):
            changes = {field: 0xABC, "digest": 1} if rank == 2 and step >= 5 else {}
            record.step(decision(step, **changes))
    named = difference(read_all(board))
    assert f"scheduler 2 and scheduler 0 disagree in step 5, {field}: abc and " in named
    assert "\n2 RUNNING 5 1 " in table(read_all(board))


def test_a_difference_that_left_the_board_still_shows(board, records):
    for step in range(1, RING + 9):
        for rank, record in enumerate(records):
            record.step(decision(step, digest=rank // 2))
    assert "scheduler 2 and scheduler 0 disagree before step 9" in difference(read_all(board))


def test_who_failed_first_is_named(board, records):
    assert first_failure(read_all(board)) is None
    records[1].step(decision(7))
    records[1].fail("ValueError: planted")
    records[0].fail("RuntimeError: connection closed")
    assert first_failure(read_all(board)) == "scheduler 1 failed in step 7: ValueError: planted"


def test_a_rank_that_stands_still_behind_the_others_hangs(board, records):
    for rank, record in enumerate(records):
        record.step(decision(4 if rank == 1 else 5))
    watchdog = watch(board)
    for _ in range(TICKS_APART + 1):
        assert watchdog.tick() is None
    fault = watchdog.tick()
    assert fault.startswith("scheduler 1 ")
    assert "hangs in step 4, while scheduler 0 " in fault


def test_a_rank_in_its_step_is_behind_one_that_has_left_it(board, records):
    for record in records:
        record.step(decision(4))
    records[1].gauges(**dict.fromkeys(GAUGES, 0))
    watchdog = watch(board)
    faults = [watchdog.tick() for _ in range(TICKS_APART + 2)]
    assert faults[:-1] == [None] * (TICKS_APART + 1)
    assert "hangs in step 4, while scheduler 1 " in faults[-1]
    assert faults[-1].endswith("is behind step 4")


def test_ranks_that_move_do_not_hang(board, records):
    watchdog = watch(board)
    for step in range(1, 3 * TICKS_APART):
        records[0].step(decision(step + 1))
        records[1].step(decision(step))
        assert watchdog.tick() is None


def test_ranks_in_the_same_place_are_slow_up_to_the_timeout(board, records):
    for record in records:
        record.step(decision(4))
    watchdog = watch(board, timeout=10.0)
    ticks = int(10.0 / TICK_SECONDS)
    faults = [watchdog.tick() for _ in range(ticks + 2)]
    assert faults[:-1] == [None] * (ticks + 1)
    assert "has not moved for 10 s, in step 4" in faults[-1]


def test_a_stopped_process_is_named_at_the_second_look(board):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        watchdog = Watchdog(board, {0: os.getpid(), 1: process.pid}, 60.0)
        assert not is_stopped(process.pid)
        assert watchdog.tick() is None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        assert watchdog.tick() is None
        assert watchdog.tick() == f"scheduler 1 (pid {process.pid}) is stopped, in step 0"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    assert not is_stopped(process.pid)
