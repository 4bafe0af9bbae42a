"""A grammar is announced once every rank's record on the board says that the rank is done with it."""

from types import SimpleNamespace

import msgspec
import pytest
import zmq

from srt.board import GRAMMARS, Board, RankRecord
from srt.messages import GrammarReady, InboxItem
from srt.scheduler.intake import LeaderIntake
from srt.scheduler.readiness import GrammarReadiness


@pytest.fixture
def board(tmp_path):
    board = Board.create(str(tmp_path / "board"), 2)
    yield board
    board.close()


def test_a_serial_is_on_the_board_until_another_takes_its_place(board):
    record = RankRecord(board, 1)
    for serial in (1, 3, GRAMMARS):
        assert not board.has_grammar(1, serial)
        record.grammar(serial)
        assert board.has_grammar(1, serial)
        assert not board.has_grammar(0, serial)
    record.grammar(GRAMMARS + 1)
    assert board.has_grammar(1, GRAMMARS + 1)
    assert not board.has_grammar(1, 1)
    assert board.has_grammar(1, 3)
    assert board.read(1).gauges


def test_a_grammar_is_announced_when_the_last_rank_has_it(board):
    records = [RankRecord(board, rank) for rank in (0, 1)]
    grammars = SimpleNamespace(compiling=(1, 2, 3))
    readiness = GrammarReadiness(board, grammars)
    records[0].grammar(2)
    records[0].grammar(1)
    records[1].grammar(3)
    assert readiness.take() == []
    records[1].grammar(2)
    assert readiness.take() == [GrammarReady(2)]
    grammars.compiling = (1, 3)
    assert readiness.take() == []
    assert readiness.awaited
    grammars.compiling = ()
    assert not readiness.awaited


def test_a_leader_that_sleeps_wakes_for_a_grammar(board, endpoints):
    records = [RankRecord(board, rank) for rank in (0, 1)]
    context = zmq.Context()
    try:
        readiness = GrammarReadiness(board, SimpleNamespace(compiling=(7,)))
        intake = LeaderIntake(endpoints.leader, context, announcements=readiness)
        assert intake.next(wait=True).items == ()
        for record in records:
            record.grammar(7)
        for wait in (True, False):
            items = [msgspec.msgpack.decode(item, type=InboxItem) for item in intake.next(wait).items]
            assert items == [GrammarReady(7)]
    finally:
        context.destroy(linger=0)
