"""What a committed token means: stop strings on bytes, stop tokens, lengths, and what is told of it."""

from __future__ import annotations

import numpy as np
import pytest
from shared.simulation import IS_SPECIAL, TOKEN_BYTES, Setting, Simulation, request

from srt.messages import Finish, pack_ids
from srt.scheduler.output import Output
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import StepResult

EOS, OTHER_EOS, TAG = 0, 1, 2
EURO = [TOKEN_BYTES.index(bytes([byte])) for byte in "€".encode()]


def token(piece: str) -> int:
    return TOKEN_BYTES.index(piece.encode())


def finish_of(tokens: list[int], max_new_tokens: int = 100, **sampling) -> tuple[int, Finish | None]:
    """After how many of the tokens the request ended, and how."""
    output = Output(TOKEN_BYTES, IS_SPECIAL)
    it = Request.from_message(request(1, [9, 9], max_new_tokens, **sampling), 1, (EOS, OTHER_EOS))
    for count, value in enumerate(tokens, start=1):
        output.token(it, value, StepResult(np.array([value], np.int32)), 0)
        if it.finish is not None:
            deltas = output.take(1).deltas
            assert [delta.finish for delta in deltas] == [None] * (count - 1) + [it.finish]
            assert b"".join(delta.ids for delta in deltas) == pack_ids(tokens[:count])
            return count, it.finish
    return len(tokens), None


@pytest.mark.parametrize(
    ("tokens", "stop", "count", "matched"),
    [
        pytest.param("a|b|c", ["bc"], 3, "bc", id="over two tokens"),
        pytest.param("a|b|c|d|e|f", ["bcde"], 5, "bcde", id="over four tokens"),
        pytest.param("aab|c", ["a"], 1, "a", id="inside a token"),
        pytest.param("c|aab|b", ["ca"], 2, "ca", id="ends inside a token"),
        pytest.param("ab|c|ab|abc", ["cc", "ababc"], 4, "ababc", id="begins anew inside a failed match"),
        pytest.param("a|b|a|b|c", ["c", "bc", "abc"], 5, "abc", id="the one that begins first"),
        pytest.param("d|abc", ["a", "abc", "ab"], 2, "abc", id="of those the longest"),
        pytest.param("d|e|f", ["xx", "f"], 3, "f", id="one of several"),
        pytest.param("a|b|c", ["ac"], 3, None, id="not in one piece"),
        pytest.param("a|\n\n|b", ["\n"], 2, "\n", id="half a token"),
        pytest.param("é|c", ["é"], 1, "é", id="one character of two bytes"),
    ],
)
def test_stop_strings(tokens, stop, count, matched):
    ids = [token(piece) for piece in tokens.split("|")]
    ended, finish = finish_of(ids, stop=tuple(map(str.encode, stop)))
    assert ended == count
    assert finish == (None if matched is None else Finish("stop", matched.encode()))


def test_stop_string_of_a_character_that_comes_byte_by_byte():
    assert finish_of([*EURO, token("a")], stop=("€".encode(),)) == (3, Finish("stop", "€".encode()))
    assert finish_of([*EURO[:2], token("a")], stop=("€".encode(),)) == (3, None)


def test_skipped_special_tokens_are_no_text():
    ids = [token("a"), TAG, token("b")]
    assert finish_of(ids, stop=(b"ab",)) == (3, Finish("stop", b"ab"))
    assert finish_of(ids, stop=(b"ab",), skip_special_tokens=False) == (3, None)
    assert finish_of(ids, stop=(b"<a>",)) == (3, None)
    assert finish_of(ids, stop=(b"<a>",), skip_special_tokens=False) == (2, Finish("stop", b"<a>"))
    assert finish_of(ids, stop=(b"a<",), skip_special_tokens=False) == (2, Finish("stop", b"a<"))


def test_stop_tokens():
    a, b = token("a"), token("b")
    assert finish_of([a, EOS, b]) == (2, Finish("stop", EOS))
    assert finish_of([a, OTHER_EOS, b]) == (2, Finish("stop", OTHER_EOS))
    assert finish_of([a, EOS, b], ignore_eos=True) == (3, None)
    assert finish_of([a, EOS, b], ignore_eos=True, stop_token_ids=(b,)) == (3, Finish("stop", b))
    assert finish_of([a, b], stop_token_ids=(b,), stop=(b"ab",)) == (2, Finish("stop", b)), "the token says more"


def test_length_comes_last():
    a, b = token("a"), token("b")
    assert finish_of([a, b, a], 2) == (2, Finish("length"))
    assert finish_of([a, b, a], 2, stop=(b"ab",)) == (2, Finish("stop", b"ab"))
    assert finish_of([a, EOS], 2) == (2, Finish("stop", EOS))
    assert finish_of([a], 1) == (1, Finish("length"))


def test_nothing_stops_before_min_new_tokens():
    a, b, c = map(token, "abc")
    assert finish_of([a, b, a, b], stop=(b"ab",), min_new_tokens=2) == (2, Finish("stop", b"ab"))
    assert finish_of([a, b, c, a, b], stop=(b"ab",), min_new_tokens=3) == (5, Finish("stop", b"ab"))
    assert finish_of([a, b, c], stop=(b"bc",), min_new_tokens=3) == (3, Finish("stop", b"bc")), "begun before"
    assert finish_of([a, b, c], stop_token_ids=(b,), min_new_tokens=3) == (3, None)


def test_an_early_match_counts_for_nothing_later():
    """The longer stop string keeps the earlier one among the bytes that are still looked at."""
    a, b, c = map(token, "abc")
    assert finish_of([a, b, c, c], stop=(b"a", b"xxxxxx"), min_new_tokens=3) == (4, None)


def test_what_the_first_delta_tells():
    stop = (b"xyz",)
    setting = Setting(overlap=False)
    message = request(2, [5] * 9 + [6], 3, stop=stop, skip_special_tokens=False, no_stop_trim=True, ignore_eos=True)
    simulation = Simulation(setting, {1: [request(1, [5] * 9, 3)], 20: [message]}).run()
    simulation.check()
    first, *others = simulation.outlet.deltas[2]
    assert first.opening.cached_tokens == 9
    assert first.opening.stop == stop
    assert not first.opening.skip_special_tokens
    assert first.opening.no_stop_trim
    assert len(others) == 2
    assert all(delta.opening is None for delta in others)


def test_logprobs_come_token_by_token_to_those_who_asked():
    asked = {1: -1, 2: 0, 3: 2, 4: 4}
    script = {1: [request(rid, [rid, rid], 5, logprobs=count) for rid, count in asked.items()]}
    simulation = Simulation(Setting(num_pages=200), script).run()
    simulation.check()
    for rid, count in asked.items():
        deltas = simulation.outlet.deltas[rid]
        if count < 0:
            assert all(delta.logprobs is None for delta in deltas)
            continue
        for value, delta in zip(simulation.outlet.outputs[rid], deltas, strict=True):
            alternatives = [(value + i) % len(TOKEN_BYTES) for i in range(count)]
            assert delta.logprobs.chosen == (-value / 8,)
            assert delta.logprobs.top_ids == (tuple(alternatives),)
            assert delta.logprobs.top == (tuple(-other / 8 for other in alternatives),)


def test_totals_leave_out_prompts_that_were_never_computed():
    output = Output(TOKEN_BYTES, IS_SPECIAL)
    served, gone = (Request.from_message(request(rid, [5] * 7), rid, ()) for rid in (1, 2))
    served.cached_tokens = 3
    output.token(served, 9, StepResult(np.array([9], np.int32)), 0)
    output.abort(served, "enough")
    output.abort(gone, "never mind")
    assert (output.prompt_tokens, output.cached_tokens, output.generated_tokens) == (7, 3, 1)
    assert (output.finished, output.aborted) == (0, 2)
    assert [delta.opening is None for delta in output.take(1).deltas] == [False, True, False]
