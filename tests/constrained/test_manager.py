"""The grammar manager: what it answers follows from the calls, whatever its threads do."""

import threading

import numpy as np
import pytest
from walk import CHECK, EOS, OTHER, TABLE, VOCABULARY

from srt.constrained import manager as module
from srt.constrained.manager import GrammarManager
from srt.frontend.constraints import Form
from srt.messages import Grammar
from srt.scheduler.schedule_batch import Draft


class Board:
    """Remembers which serials are done, and can be waited on."""

    def __init__(self):
        self.done = []
        self._changed = threading.Condition()

    def finished(self, serial):
        with self._changed:
            self.done.append(serial)
            self._changed.notify_all()

    def wait(self, serial):
        with self._changed:
            assert self._changed.wait_for(lambda: serial in self.done, 60)


def regex(pattern, starts_after=-1):
    grammar = CHECK(Form("regex", pattern, "x"))
    return Grammar(grammar.backend, grammar.text, starts_after)


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def grammars(board):
    return GrammarManager(VOCABULARY, board.finished, window=4)


def opened(grammars, board, rid, grammar, ignore_eos=False):
    if not grammars.open(rid, grammar, ignore_eos):
        serial = grammars.compiling[-1]
        board.wait(serial)
        assert grammars.ready(serial) == [(rid, "")]


def mask(grammars, *rids):
    masks = grammars.masks(list(range(len(rids))), list(rids), {})
    assert masks.places.tolist() == list(range(len(rids)))
    return allowed(masks)


def allowed(masks):
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_a_request_follows_its_grammar_to_the_end(grammars, board):
    opened(grammars, board, 1, regex("ab|c"))
    opened(grammars, board, 2, regex("ab*"))
    assert mask(grammars, 1, 2) == [[ord("a"), ord("c")], [ord("a")]]
    assert grammars.accept(1, ord("a")) == (False, "")
    assert grammars.accept(2, ord("a")) == (False, "")
    assert mask(grammars, 1, 2) == [[ord("b")], [ord("b"), EOS]]
    assert grammars.accept(1, ord("b")) == (True, "")
    assert mask(grammars, 2) == [[ord("b"), EOS]]
    assert grammars.accept(2, EOS) == (True, "")


def test_an_eos_that_is_ignored_comes_only_where_nothing_else_may(grammars, board):
    opened(grammars, board, 1, regex("a{1,2}"), ignore_eos=True)
    grammars.accept(1, ord("a"))
    assert mask(grammars, 1) == [[ord("a")]]
    assert grammars.accept(1, ord("a")) == (True, "")


def test_a_grammar_may_begin_behind_a_token(grammars, board):
    opened(grammars, board, 1, regex("a", starts_after=OTHER))
    everything = [token for token in range(len(TABLE)) if token != EOS]
    assert mask(grammars, 1) == [everything]
    assert grammars.accept(1, ord("z")) == (False, "")
    assert mask(grammars, 1) == [everything]
    assert grammars.accept(1, OTHER) == (False, "")
    assert mask(grammars, 1) == [[ord("a")]]
    assert grammars.accept(1, ord("a")) == (True, "")


def test_a_token_that_does_not_follow_is_a_fault(grammars, board):
    opened(grammars, board, 1, regex("a"))
    assert grammars.accept(1, ord("b")).fault


def test_what_the_grammar_forces_is_drafted_and_used_up(grammars, board):
    opened(grammars, board, 1, regex("a?bcdef"))
    assert grammars.forced(1) == ((), 0)
    grammars.accept(1, ord("a"))
    assert grammars.forced(1) == (tuple(b"bcde"), 4)  # one token more is no draft
    grammars.accept(1, ord("b"))
    assert grammars.forced(1) == (tuple(b"cde"), 3)
    for token in b"cde":
        grammars.accept(1, token)
    assert grammars.forced(1) == ((), 0)
    assert grammars.accept(1, ord("f")) == (True, "")
    assert grammars.forced(1) == ((), 0)


def test_nothing_is_drafted_before_the_grammar_begins(grammars, board):
    opened(grammars, board, 1, regex("abc", starts_after=OTHER))
    assert grammars.forced(1) == ((), 0)
    grammars.accept(1, OTHER)
    assert grammars.forced(1) == (tuple(b"ab"), 2)


def test_masks_behind_a_draft_are_those_of_its_tokens_one_after_the_other(grammars, board):
    """Behind a token that is not allowed there is none, and each grammar is left where it stood."""
    for rid, pattern in ((1, "a?bc*d"), (2, "x|yz"), (3, "abc[de]")):
        opened(grammars, board, rid, regex(pattern))
    opened(grammars, board, 4, regex("q", starts_after=OTHER))
    free = mask(grammars, 4)[0]
    drafts = {1: Draft(tuple(b"abcx"), 0), 3: Draft(tuple(b"abcd"), 3), 4: Draft((ord("a"), OTHER), 0)}
    for _ in range(2):
        masks = grammars.masks([0, 5, 6, 8], [1, 2, 3, 4], drafts)
        assert masks.places.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
        found = allowed(masks)
        assert found[:4] == [[*b"ab"], [*b"b"], [*b"cd"], [*b"cd"]]
        assert found[4:6] == [[*b"xy"], [*b"de"]]
        assert found[6:] == [[EOS], free, free, [*b"q"]]
    assert mask(grammars, 1, 2, 3, 4) == [[*b"ab"], [*b"xy"], [*b"a"], free]


def test_equal_grammars_are_compiled_once_and_counted_only_when_announced(grammars, board):
    assert not grammars.open(1, regex("a"), False)
    board.wait(1)
    assert not grammars.open(2, regex("a"), False), "no inbox has told that all ranks have it"
    assert not grammars.open(3, regex("b"), False)
    board.wait(2)
    grammars.drop(1)
    assert grammars.ready(2) == [(3, "")]
    assert grammars.ready(1) == [(2, "")]
    assert grammars.open(4, regex("a"), False)
    assert mask(grammars, 2, 3, 4) == [[ord("a")], [ord("b")], [ord("a")]]
    assert grammars.compiling == ()


def test_what_does_not_compile_is_told_to_all_who_wait_and_forgotten(grammars, board):
    bad = Grammar("llguidance", "start: undefined")
    assert not grammars.open(1, bad, False)
    assert not grammars.open(2, bad, False)
    board.wait(1)
    (first, fault), second = grammars.ready(1)
    assert first == 1
    assert "undefined" in fault
    assert second == (2, fault)
    grammars.drop(1)
    assert not grammars.open(3, bad, False)


def test_serials_under_way_lie_within_the_window(grammars, board):
    for rid in range(10):
        assert not grammars.open(rid, regex(f"a{{{rid + 1}}}"), False)
    assert grammars.compiling == (1, 2, 3, 4)
    for serial in (2, 3, 4):
        board.wait(serial)
        grammars.ready(serial)
    assert grammars.compiling == (1,)
    board.wait(1)
    assert grammars.ready(1) == [(0, "")]
    assert grammars.compiling == (5, 6, 7, 8)


@pytest.mark.parametrize(("bound", "most"), [("MAX_CACHED", 2), ("MAX_CACHED_TEXT", 2 * len(regex("a").text))])
def test_the_least_recently_wanted_are_forgotten_first(grammars, board, monkeypatch, bound, most):
    monkeypatch.setattr(module, bound, most)
    for rid, pattern in enumerate(("a", "b")):
        opened(grammars, board, rid, regex(pattern))
    assert grammars.open(2, regex("a"), False)
    opened(grammars, board, 3, regex("c"))
    assert grammars.open(4, regex("a"), False)
    assert not grammars.open(5, regex("b"), False)
    assert mask(grammars, 1) == [[ord("b")]], "who has a matcher keeps it"


def test_two_managers_answer_alike(board):
    """Also where their threads are done in another order."""
    other_board = Board()
    pair = [GrammarManager(VOCABULARY, each.finished, 4) for each in (board, other_board)]
    calls = [(1, "[ab]+"), (2, "x"), (3, "[ab]+")]
    answers = []
    for grammars, its_board in zip(pair, (board, other_board), strict=True):
        said = [grammars.open(rid, regex(pattern), False) for rid, pattern in calls]
        its_board.wait(2)
        its_board.wait(1)
        said += [grammars.ready(2), grammars.ready(1), mask(grammars, 1, 2, 3), grammars.accept(2, ord("x"))]
        answers.append(said)
    assert answers[0] == answers[1]
