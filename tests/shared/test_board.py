"""The board: one process writes, another reads, and nobody sees half a record."""

import os
import signal
import subprocess
import sys
import time

import pytest

from srt.board import GAUGES, RING, Board, Decision, Phase, RankRecord, decision_in

HAMMER = """
import itertools, os, sys
from srt.board import GAUGES, Board, Decision, Phase, RankRecord
record = RankRecord(Board(sys.argv[1], 2), 1)
record.step(Decision(1, 0x9E3779B97F4A7C15, *[1] * 7))
record.gauges(**dict.fromkeys(GAUGES, 1))
print(flush=True)
for n in itertools.count(2):
    record.step(Decision(n, n * 0x9E3779B97F4A7C15 % 2**64, *[n] * 7))
    record.gauges(**dict.fromkeys(GAUGES, n))
    record.beat(Phase.IDLE)
"""


def digest_of(step):
    return step * 0x9E3779B97F4A7C15 % 2**64


def decision(step, digest=None):
    return Decision(step, digest_of(step) if digest is None else digest, *range(step, step + 7))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "board")


def test_a_record_is_empty_until_its_rank_writes(path):
    record = Board.create(path, 2).read(1)
    assert (record.pid, record.phase, record.step, record.digest, record.recent) == (0, Phase.STARTING, 0, 0, ())
    assert record.gauges == dict.fromkeys(GAUGES, 0)


def test_what_a_rank_writes_is_read_elsewhere(path):
    reader = Board.create(path, 3)
    writer = RankRecord(Board(path, 3), 1)
    before = time.monotonic()
    writer.step(decision(1, 2**64 - 1))
    gauges = {name: 10 + index for index, name in enumerate(GAUGES)}
    writer.gauges(**gauges)
    writer.beat(Phase.IDLE)

    record = reader.read(1)
    assert (record.pid, record.phase) == (os.getpid(), Phase.IDLE)
    assert (record.step, record.digest, record.recent) == (1, 2**64 - 1, (decision(1, 2**64 - 1),))
    assert record.gauges == gauges
    assert before <= record.heartbeat <= time.monotonic()
    assert reader.read(0).pid == reader.read(2).pid == 0


def test_the_last_steps_are_kept_oldest_first(path):
    board = Board.create(path, 1)
    writer = RankRecord(board, 0)
    for step in range(1, 2 * RING + 6):
        writer.step(decision(step))
        recent = board.read(0).recent
        assert recent == tuple(map(decision, range(max(1, step - RING + 1), step + 1)))
        assert decision_in(board.entry(0, step)) == decision(step)


def test_last_words_are_kept(path):
    board = Board.create(path, 1)
    writer = RankRecord(board, 0)
    assert board.read(0).failure == ""
    writer.fail("\udcff" + "é" * 1000)  # a file's name may be no text
    record = board.read(0)
    assert record.phase == Phase.FAILED
    assert record.failure == "?" + "é" * 199
    assert record.recent == ()


def test_what_a_rank_elsewhere_writes_is_dated_when_it_comes(path, monkeypatch):
    """Its own clock may say anything."""
    there, here = Board.create(path + "there", 2), Board.create(path, 2)
    writes = []
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: -1e9)
        record = RankRecord(there, 1)
        record.step(decision(1))  # before anybody listened
        record.mirror(lambda at, data, more: writes.append((at, data)))
        record.step(decision(2))
        record.gauges(**dict.fromkeys(GAUGES, 7))
        record.fail("gone")
    before = time.monotonic()
    for at, data in writes:
        here.put(1, at, data)
    found, own = here.read(1), there.read(1)
    assert own.heartbeat == -1e9
    assert before <= found.heartbeat <= time.monotonic()
    assert (found.pid, found.phase, found.step, found.digest) == (own.pid, own.phase, own.step, own.digest)
    assert (found.gauges, found.failure, found.recent) == (own.gauges, own.failure, own.recent[1:])
    assert here.entry(1, 2) == there.entry(1, 2)
    assert here.read(0).pid == 0


def test_a_board_is_made_once(path):
    Board.create(path, 1).close()
    with pytest.raises(FileExistsError):
        Board.create(path, 1)


def test_a_reader_never_sees_half_a_record(path):
    board = Board.create(path, 2)
    process = subprocess.Popen([sys.executable, "-c", HAMMER, path], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        last, changes = 0, 0
        deadline = time.monotonic() + 60
        while changes < 500:
            assert time.monotonic() < deadline
            record = board.read(1)
            changes += record.step != last
            assert record.pid == process.pid
            assert record.digest == digest_of(record.step)
            # The ring is read after the head, so it may be ahead of it, and its oldest step be written over.
            assert all(d == Decision(d.step, digest_of(d.step), *[d.step] * 7) for d in record.recent)
            steps = [d.step for d in record.recent]
            assert steps[-1] >= record.step
            # A reader that is held up may meet a write at several places, but hardly at half of them.
            assert len(steps) >= min(record.step, RING) // 2
            assert len(set(record.gauges.values())) == 1
            assert record.step - 1 <= record.gauges["running"] <= record.step
            assert record.step >= last
            last = record.step

        process.send_signal(signal.SIGKILL)
        process.wait()
        assert board.read(1).step >= last  # what it wrote last outlives it, wherever it was stopped
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
