"""The incremental text against the decoding of the whole, for any tokens and any split into deltas."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detokenizer.detokenizer import Detokenizer, stop_begins
from srt.messages import Finish, Opening, TextDelta, TokenBatch, TokenDelta, TokenLogprobs, pack_ids
from srt.token_bytes import TokenBytes

EOS = 256
PIECES = [bytes([byte]) for byte in range(256)]
PIECES += [
    b"<eos>",
    b"<pad>",
    b" the",
    b"ab",
    b"abab",
    "é".encode(),
    "日本".encode(),
    "🙂".encode()[:3],
    "🙂".encode()[2:],
]
IS_SPECIAL = [token in (256, 257) for token in range(len(PIECES))]
TABLE = TokenBytes(PIECES, bytes(IS_SPECIAL), strips_leading_space=False)

LENGTH = Finish("length")


def opening(stop=(), skip_special_tokens=True, no_stop_trim=False, cached_tokens=0):
    return Opening(cached_tokens, tuple(stop), skip_special_tokens, no_stop_trim)


def whole_bytes(tokens, skip_special_tokens=True):
    return b"".join(PIECES[token] for token in tokens if not (skip_special_tokens and IS_SPECIAL[token]))


def deltas_of(rid, tokens, cuts, opened, finish):
    """One delta for each piece between two cuts, the first with the opening and the last with the finish."""
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    spans = list(zip(edges, edges[1:], strict=False))
    return [
        TokenDelta(
            rid,
            pack_ids(tokens[start:end]),
            opened if index == 0 else None,
            finish if index == len(spans) - 1 else None,
        )
        for index, (start, end) in enumerate(spans)
    ]


def texts(detokenizer, deltas):
    """The text of each delta, every delta in a step of its own."""
    shown = []
    for step, delta in enumerate(deltas):
        batch = detokenizer.decode(TokenBatch(step, (delta,)))
        assert batch.step == step
        assert [out.ids for out in batch.deltas] == [delta.ids]
        shown.append(batch.deltas[0].text)
    return shown


tokens_of_any_kind = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)
tokens_of_few_bytes = st.lists(st.sampled_from([*b"abc", 259, 260, 256]), max_size=30)
text_tokens = st.text(max_size=12).map(lambda text: list(text.encode()))
tokens_strategy = st.one_of(tokens_of_any_kind, tokens_of_few_bytes, text_tokens)
cuts_strategy = st.lists(st.integers(0, 30), max_size=12)
stop_strategy = st.lists(st.text("abc é日", min_size=1, max_size=5).map(str.encode), max_size=3)


@given(tokens_strategy, cuts_strategy, st.booleans(), stop_strategy)
def test_any_split_gives_the_text_of_the_whole(tokens, cuts, skip, stop):
    detokenizer = Detokenizer(TABLE)
    chunks = texts(detokenizer, deltas_of(7, tokens, cuts, opening(stop, skip), LENGTH))
    whole = whole_bytes(tokens, skip).decode(errors="replace")
    assert "".join(chunks) == whole
    assert detokenizer.num_open == 0


@given(st.text(max_size=20), cuts_strategy)
def test_no_chunk_shows_part_of_a_character(text, cuts):
    chunks = texts(Detokenizer(TABLE), deltas_of(7, list(text.encode()), cuts, opening(), LENGTH))
    assert "".join(chunks) == text
    assert sum(chunk.count("\ufffd") for chunk in chunks) == text.count("\ufffd")


@given(tokens_of_few_bytes, stop_strategy.filter(bool), cuts_strategy, st.booleans())
def test_a_stop_string_ends_the_text_where_it_first_stands(tokens, stop, cuts, no_stop_trim):
    end, matched = first_stop(tokens, stop)
    finish = LENGTH if matched is None else Finish("stop", matched)
    before_the_last = [min(cut, max(end - 1, 0)) for cut in cuts]  # the token that ends it comes with the finish
    deltas = deltas_of(7, tokens[:end], before_the_last, opening(stop, True, no_stop_trim), finish)
    chunks = texts(Detokenizer(TABLE), deltas)

    whole = whole_bytes(tokens[:end])
    if matched is not None:
        whole = whole[: whole.index(matched) + (len(matched) if no_stop_trim else 0)]
    assert "".join(chunks) == whole.decode(errors="replace")


def first_stop(tokens, stop):
    """How many tokens it takes until one of the stop strings is there, and which one the scheduler would name."""
    for end in range(1, len(tokens) + 1):
        data = whole_bytes(tokens[:end])
        found = [s for s in stop if s in data]
        if found:
            return end, min(found, key=data.index)
    return len(tokens), None


@given(st.binary(max_size=12), st.lists(st.binary(min_size=1, max_size=4), max_size=4))
def test_stop_begins_is_the_longest_tail_that_begins_a_stop(data, stops):
    tails = [i for i in range(len(data)) if any(s.startswith(data[i:]) and s != data[i:] for s in stops)]
    assert stop_begins(data, stops) == min(tails, default=len(data))


@given(
    st.text("ab", max_size=12).map(str.encode),
    st.lists(st.text("ab", min_size=1, max_size=6).map(str.encode), max_size=3),
)
def test_stop_begins_with_overlapping_stops(data, stops):
    tails = [i for i in range(len(data)) if any(s.startswith(data[i:]) and s != data[i:] for s in stops)]
    assert stop_begins(data, stops) == min(tails, default=len(data))


def test_a_tail_that_may_begin_a_stop_is_held_until_it_cannot():
    detokenizer = Detokenizer(TABLE)
    deltas = deltas_of(1, list(b"xabxabc"), [1, 2, 3, 4, 5, 6], opening([b"abc"]), Finish("stop", b"abc"))
    assert texts(detokenizer, deltas) == ["x", "", "", "abx", "", "", ""]


def test_a_held_tail_is_released_at_the_end():
    deltas = deltas_of(1, list(b"xab"), [1, 2], opening([b"abc"]), LENGTH)
    assert texts(Detokenizer(TABLE), deltas) == ["x", "", "ab"]


def test_a_match_before_min_new_tokens_is_text():
    deltas = deltas_of(1, [*b"abab", *b"a"], [3], opening([b"aba", b"abac"]), Finish("stop", b"aba"))
    assert texts(Detokenizer(TABLE), deltas) == ["", "ab"]


def test_text_behind_the_match_in_the_same_token_is_cut():
    for no_stop_trim, text in ((False, "x"), (True, "xa")):
        deltas = deltas_of(1, [ord("x"), 260], [1], opening([b"a"], no_stop_trim=no_stop_trim), Finish("stop", b"a"))
        assert "".join(texts(Detokenizer(TABLE), deltas)) == text


def test_a_character_in_several_tokens_is_shown_once_it_is_whole():
    face = "🙂".encode()
    deltas = deltas_of(1, list(b"a" + face + b"b"), [1, 2, 3, 4, 5], opening(), LENGTH)
    assert texts(Detokenizer(TABLE), deltas) == ["a", "", "", "", "🙂", "b"]


def test_an_unfinished_character_is_replaced_at_the_end():
    deltas = deltas_of(1, list(b"a\xf0\x9f"), [1, 2], opening(), LENGTH)
    assert texts(Detokenizer(TABLE), deltas) == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stop_token", "skip", "no_stop_trim", "text"),
    [
        (EOS, True, False, "hi"),
        (EOS, False, False, "hi"),
        (EOS, False, True, "hi<eos>"),
        (EOS, True, True, "hi"),  # kept, but special
        (258, True, False, "hi"),
        (258, True, True, "hi the"),
    ],
)
def test_a_stop_token_is_no_text_but_stays_among_the_ids(stop_token, skip, no_stop_trim, text):
    tokens = [*b"hi", stop_token]
    for cuts in ([], [1], [2], [1, 2]):
        detokenizer = Detokenizer(TABLE)
        deltas = deltas_of(1, tokens, cuts, opening((), skip, no_stop_trim), Finish("stop", stop_token))
        assert "".join(texts(detokenizer, deltas)) == text


def test_special_tokens_inside_the_text_are_skipped_or_kept():
    tokens = [ord("a"), 257, *"é".encode()[:1], 257, *"é".encode()[1:]]
    assert "".join(texts(Detokenizer(TABLE), deltas_of(1, tokens, [1, 2, 3, 4], opening(), LENGTH))) == "aé"
    kept = texts(Detokenizer(TABLE), deltas_of(1, tokens, [], opening(skip_special_tokens=False), LENGTH))
    assert "".join(kept) == "a<pad>\ufffd<pad>\ufffd"


def test_ids_beyond_the_tokenizer_stand_for_nothing():
    deltas = deltas_of(1, [ord("a"), len(PIECES), len(PIECES) + 9, ord("b")], [1, 2], opening(), LENGTH)
    assert texts(Detokenizer(TABLE), deltas) == ["a", "", "b"]


def test_every_delta_is_answered_in_order_with_all_it_brought():
    detokenizer = Detokenizer(TABLE)
    logprobs = TokenLogprobs((-0.5,), ((1, 2),), ((-0.5, -1.0),))
    first = TokenBatch(
        5,
        (
            TokenDelta(3, pack_ids([ord("a")]), opening(cached_tokens=11), None, logprobs),
            TokenDelta(2, pack_ids([]), opening(), Finish("abort", None, "queue is full", 503)),
            TokenDelta(9, pack_ids([0xE6]), opening(cached_tokens=0)),
        ),
    )
    assert detokenizer.decode(first).deltas == (
        TextDelta(3, "a", pack_ids([ord("a")]), 11, None, logprobs),
        TextDelta(2, "", b"", 0, Finish("abort", None, "queue is full", 503)),
        TextDelta(9, "", pack_ids([0xE6]), 0),
    )
    second = TokenBatch(6, (TokenDelta(9, pack_ids([ord("z")]), None, LENGTH), TokenDelta(3, pack_ids([ord("b")]))))
    assert detokenizer.decode(second).deltas == (
        TextDelta(9, "\ufffdz", pack_ids([ord("z")]), -1, LENGTH),
        TextDelta(3, "b", pack_ids([ord("b")])),
    )
    assert detokenizer.num_open == 1


def test_tokens_of_a_request_that_is_not_open_are_ignored_and_logged(caplog):
    detokenizer = Detokenizer(TABLE)
    finished = TokenDelta(1, pack_ids([97]), opening(), LENGTH)
    late = TokenDelta(1, pack_ids([98]))
    other = TokenDelta(2, pack_ids([99]), opening())
    batch = detokenizer.decode(TokenBatch(1, (finished, late, other)))
    assert [(delta.rid, delta.text) for delta in batch.deltas] == [(1, "a"), (2, "c")]
    assert "request 1" in caplog.text


def test_state_is_bounded_by_the_longest_stop_and_gone_with_the_request():
    """Whatever is generated, what is held back stays below the longest stop string and one character."""
    rng = random.Random(5)
    stop = (b"aaaaaaab", b"ba", "é日".encode())
    detokenizer = Detokenizer(TABLE)
    for rid in range(20):
        for step in range(200):
            tokens = [rng.choice([*b"aaaab", 0xC3, 0xE6, 0xF0, 256, 260]) for _ in range(rng.randrange(3))]
            delta = TokenDelta(rid, pack_ids(tokens), opening(stop) if step == 0 else None)
            detokenizer.decode(TokenBatch(step, (delta,)))
            assert len(detokenizer._open[rid]._held) <= max(map(len, stop)) - 1 + 3
        detokenizer.decode(TokenBatch(200, (TokenDelta(rid, b"", None, LENGTH),)))
        assert detokenizer.num_open == 0
