"""The leader lets nothing leave that another rank has not decided too."""

from __future__ import annotations

import threading
import time

import pytest
from shared.fakes import RecordingOutlet

from srt.board import Board, Decision, RankRecord
from srt.messages import ControlReply, Opening, TokenBatch, TokenDelta, pack_ids
from srt.scheduler.outlet import AgreedOutlet, Disagreement


@pytest.fixture
def board(tmp_path):
    board = Board.create(str(tmp_path / "board"), 3)
    yield board
    board.close()


@pytest.fixture
def records(board):
    return [RankRecord(board, rank) for rank in range(3)]


def decision(step, tokens=0):
    return Decision(step, step, 0, tokens, 0, 0, 0, 0, 0)


def batch(step):
    return TokenBatch(step, (TokenDelta(step, pack_ids([step]), Opening(0, (), True, False)),))


def test_what_a_step_gave_waits_for_the_next_decision_of_all(board, records):
    inner = RecordingOutlet()
    outlet = AgreedOutlet(inner, board)
    for record in records:
        record.step(decision(1))
    outlet.release(1)
    outlet.tokens(batch(1))
    outlet.reply(ControlReply(7, True, ""))
    assert outlet.holds
    assert not inner.outputs
    for record in records[:2]:
        record.step(decision(2))

    left_before = []

    def decide_late():
        time.sleep(0.1)
        left_before.append(dict(inner.outputs))
        records[2].step(decision(2))

    late = threading.Thread(target=decide_late)
    late.start()
    outlet.release(2)
    late.join()
    assert left_before == [{}]
    assert inner.outputs == {1: [1]}
    assert [reply.ticket for reply in inner.replies] == [7]
    assert not outlet.holds


def test_a_step_without_tokens_holds_nothing(board):
    outlet = AgreedOutlet(RecordingOutlet(), board)
    outlet.tokens(TokenBatch(1, ()))
    assert not outlet.holds


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_nothing_leaves_after_a_disagreement(board, records, odd):
    inner = RecordingOutlet()
    outlet = AgreedOutlet(inner, board)
    outlet.tokens(batch(1))
    for rank, record in enumerate(records):
        record.step(decision(2, tokens=int(rank == odd)))
    with pytest.raises(Disagreement, match="decided otherwise than rank 0 in step 2"):
        outlet.release(2)
    assert not inner.outputs
