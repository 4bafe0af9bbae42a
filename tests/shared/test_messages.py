"""Every message arrives as it was sent."""

import inspect

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt import messages
from srt.messages import (
    AbortNamed,
    AbortRequest,
    ConfigureLogging,
    ContinueGeneration,
    ControlReply,
    EngineFailed,
    Finish,
    FlushCache,
    FrontendItem,
    Grammar,
    GrammarReady,
    Inbox,
    InboxItem,
    Message,
    NewRequest,
    Opening,
    PauseGeneration,
    SamplingParams,
    ShowTree,
    ShowWorker,
    Started,
    StartProfile,
    StopProfile,
    TextBatch,
    TextDelta,
    TokenBatch,
    TokenDelta,
    TokenLogprobs,
    TreeReply,
    UpdateWeights,
    UseWeights,
    WorkerReply,
    pack_ids,
    unpack_ids,
)

SAMPLING = SamplingParams(
    max_new_tokens=7,
    temperature=0.5,
    seed=2**63 - 1,
    logit_bias=((3, -1.5), (4, 2.0)),
    stop=("é".encode(), b"\x00"),
    stop_token_ids=(1, 2),
)
LOGPROBS = TokenLogprobs((-0.25,), ((5, 6),), ((-0.25, -1.5),))
STARTED = Started(1e6, 1e6 + 1e-6, 2e6)
FINISHES = [
    Finish("stop", 2),
    Finish("stop", b"\n\n"),
    Finish("stop", b""),
    Finish("length", num_retractions=3),
    Finish("abort", message="the queue is full", status=503),
]
BY_ARROW = {
    InboxItem: [
        NewRequest(2**53, pack_ids([1, 2, 3]), SAMPLING, b"salt", -5),
        NewRequest(0, b"", SamplingParams(0)),
        NewRequest(1, b"", SamplingParams(0), grammar=Grammar("llguidance", "start: /é/", 7)),
        GrammarReady(2**40),
        AbortRequest(7),
        AbortRequest(8, "timed out"),
        FlushCache(3, 1.5),
        PauseGeneration(4, True),
        ContinueGeneration(5),
        StartProfile(6, "/é", 7),
        StopProfile(8),
        UpdateWeights(9, "/é"),
        ShowTree(4, 1000, 64),
    ],
    Inbox: [Inbox(1, 0.5, ()), Inbox(2**40, 1e9, (b"\x00", b""))],
    TokenBatch: [
        TokenBatch(1, ()),
        TokenBatch(
            2,
            (
                TokenDelta(1, pack_ids([5]), Opening(9, (b"stop", b"\xff"), False, True, STARTED), None, LOGPROBS),
                *(TokenDelta(rid, b"", None, finish) for rid, finish in enumerate(FINISHES)),
            ),
            1e6,
            1e6 + 1e-6,
        ),
    ],
    FrontendItem: [
        TextBatch(
            3,
            (TextDelta(1, "日本\x00🙂", pack_ids([5]), 9, None, LOGPROBS, None, STARTED), TextDelta(2, "", b"")),
            1.5,
            2.5,
            3.5,
        ),
        *(TextBatch(4, (TextDelta(1, "", b"", -1, finish),)) for finish in FINISHES),
        ControlReply(3, False, "2 requests are running"),
        TreeReply(4, ((-1, 5, 1, 0, b""), (0, 2**20, 0, 2**40, pack_ids([1, 2])))),
        AbortNamed(1, None, "Generation was paused."),
        UseWeights(2, "/models/日本", "v2"),
        ConfigureLogging(3, "debug", True, 2),
        ShowWorker(4),
        EngineFailed("rank 1 has died"),
        WorkerReply(5, b"{}", b"[]"),
    ],
}


@pytest.mark.parametrize(("arrow", "message"), [(arrow, message) for arrow in BY_ARROW for message in BY_ARROW[arrow]])
def test_a_message_arrives_as_it_was_sent(arrow, message):
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=arrow)
    assert arrived == message
    assert type(arrived) is type(message)


def test_all_messages_are_in_the_test_above():
    def kinds(value):
        if isinstance(value, Message):
            yield type(value)
            for name in value.__struct_fields__:
                yield from kinds(getattr(value, name))
        elif isinstance(value, tuple):
            for item in value:
                yield from kinds(item)

    seen = {kind for values in BY_ARROW.values() for message in values for kind in kinds(message)}
    defined = {kind for _, kind in inspect.getmembers(messages, inspect.isclass) if issubclass(kind, Message)}
    assert defined - seen == {Message}


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_are_little_endian_int32(ids):
    packed = pack_ids(ids)
    assert packed == np.array(ids, "<i4").tobytes()
    assert unpack_ids(packed).tolist() == ids
    assert pack_ids(unpack_ids(packed)) == packed


def test_an_id_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_a_message_is_a_value():
    delta = TokenDelta(1, b"")
    with pytest.raises(AttributeError):
        delta.rid = 2
    assert hash(delta) == hash(TokenDelta(1, b""))


@pytest.mark.parametrize("raw", [b"", b"\xc1", msgspec.msgpack.encode([9, 1]), msgspec.msgpack.encode([2, "rid"])])
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(raw, type=InboxItem)
