"""Shared by every process: the messages that cross between them, and nothing else.

One union per arrow of the house: frontend -> leader (`InboxItem`), leader -> detokenizer (`TokenBatch`),
detokenizer and leader -> frontend, and between the processes of the frontend (`FrontendItem`). Everything is a msgspec
Struct encoded as msgpack arrays; token ids travel as little-endian int32 bytes, because a list of Python ints costs
ten times as much to encode, and more the longer it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import msgspec

Ids = bytes
"""Token ids as little-endian int32 bytes."""


def pack_ids(ids: Sequence[int]) -> Ids:
    return array("i", ids).tobytes()


def unpack_ids(ids: Ids) -> array:
    unpacked = array("i")
    unpacked.frombytes(ids)
    return unpacked


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what crosses a process. Array-like: fields are positional on the wire, so both ends run one version."""


class SamplingParams(Message):
    """How one request chooses its tokens and when it ends. Validated in the frontend; asserted nowhere."""

    max_new_tokens: int  # 0: only the prompt's logprobs are wanted
    min_new_tokens: int = 0  # until then neither EOS nor a stop token can be sampled
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; always given: the frontend draws one where the client does not
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[bytes, ...] = ()  # UTF-8
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False  # keep the matched stop string in the text
    logprobs: int = -1  # alternatives reported beside the chosen token; -1: no logprobs at all
    prompt_logprobs: int = -1  # the same of the prompt's tokens, from position `prompt_logprobs_start` on
    prompt_logprobs_start: int = 0
    logprob_ids: tuple[int, ...] = ()  # reported at each position that has logprobs, whatever is chosen there


class Grammar(Message):
    """What an output must be, in the language of one backend of `srt/constrained`. Checked in the frontend."""

    backend: str
    text: str
    starts_after: int = -1  # the output's first token of this id is the last one that is free; -1: none is free


# ---- frontend -> leader ---------------------------------------------------------------------------------------------


class NewRequest(Message, tag=1):
    rid: int  # unique in the life of a server, given by the frontend
    ids: Ids
    sampling: SamplingParams
    namespace: bytes = b""  # cache_salt, extra_key, adapter: prefixes are shared within one namespace only
    priority: int = 0
    grammar: Grammar | None = None


class AbortRequest(Message, tag=2):
    """The client left or asked for it. Unknown and finished rids are ignored: the abort may cross the last token."""

    rid: int
    message: str = "aborted"


class FlushCache(Message, tag=3):
    """Forget every cached prefix. Refused while requests wait or run, or once `timeout_s` has passed without a lull."""

    ticket: int
    timeout_s: float = 0.0


class GrammarReady(Message, tag=4):
    """The leader's own: every rank has compiled the grammar with this number, or failed to."""

    serial: int


class PauseGeneration(Message, tag=5):
    """No further step is planned until it is told to continue; new requests wait."""

    ticket: int
    retract: bool = False  # running requests give their memory back, and are computed again later


class ContinueGeneration(Message, tag=6):
    ticket: int


class StartProfile(Message, tag=7):
    """Each rank writes a trace of its next `num_steps` steps to `folder`, or of fewer if it is stopped before."""

    ticket: int
    folder: str
    num_steps: int


class StopProfile(Message, tag=8):
    ticket: int


class UpdateWeights(Message, tag=9):
    """Other weights of the same shapes, while generation is paused with all requests retracted.

    Without a `folder` those that were there before the last ones.
    """

    ticket: int
    folder: str | None


class ShowTree(Message, tag=10):
    """Somebody wants to see the radix tree: so many nodes at most, with the ids of so many tokens of each."""

    ticket: int
    most_nodes: int
    most_tokens: int


ControlItem = FlushCache | PauseGeneration | ContinueGeneration | StartProfile | StopProfile | UpdateWeights | ShowTree
InboxItem = NewRequest | AbortRequest | GrammarReady | ControlItem


class Inbox(Message):
    """What one scheduler step has heard: the same bytes on every rank, in the same order."""

    number: int
    now: float  # the leader's CLOCK_MONOTONIC in seconds: the only clock below the intake
    items: tuple[bytes, ...]  # encoded InboxItems


# ---- leader -> detokenizer ------------------------------------------------------------------------------------------


class Finish(Message):
    reason: str  # "stop", "length" or "abort"
    matched: int | bytes | None = None  # the stop token's id or the stop string that ended it
    message: str = ""  # of an abort
    status: int = 0  # HTTP status of an abort that is the server's doing; 0: the client's own
    num_retractions: int = 0


class Started(Message):
    """When a request got how far, on the leader's clock in seconds; `srt/observe/timeline.py` says what each means."""

    heard: float
    admitted: float = 0.0
    launched: float = 0.0


class Opening(Message):
    """What the detokenizer must know of a request, sent with its first tokens."""

    cached_tokens: int
    stop: tuple[bytes, ...]
    skip_special_tokens: bool
    no_stop_trim: bool
    started: Started | None = None
    restored_tokens: int = 0  # of the cached ones, from host memory


class TokenLogprobs(Message):
    """One entry per token. Natural logarithms, before temperature and filters."""

    chosen: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]  # most likely first
    top: tuple[tuple[float, ...], ...]
    asked: tuple[tuple[float, ...], ...] = ()  # of `logprob_ids`; empty if there are none


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """What they say, one after the other."""
    fields = zip(*map(msgspec.structs.astuple, parts), strict=True)
    return TokenLogprobs(*(tuple(chain.from_iterable(field)) for field in fields))


class TokenDelta(Message):
    """New tokens of one request. The first delta has an opening, the last a finish; one delta may be both."""

    rid: int
    ids: Ids
    opening: Opening | None = None
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None  # all that were asked for, with the first delta


class TokenBatch(Message, tag=1):
    """All that one step gave: one message a step, never one a request."""

    step: int
    deltas: tuple[TokenDelta, ...]
    computed: float = 0.0  # when the tokens were on the CPU, on the leader's clock
    released: float = 0.0  # when they left it


# ---- detokenizer, leader -> frontend --------------------------------------------------------------------------------


class TextDelta(Message):
    """`text` is what the client may see now: whole characters, and no tail that may yet become a stop string."""

    rid: int
    text: str
    ids: Ids
    cached_tokens: int = -1  # given with a request's first delta
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    started: Started | None = None  # given with a request's first delta
    restored_tokens: int = 0  # of the cached ones, from host memory


class TextBatch(Message, tag=2):
    """The text of one step; without deltas, a sign that the detokenizer lives."""

    step: int
    deltas: tuple[TextDelta, ...]
    computed: float = 0.0  # as in its TokenBatch
    released: float = 0.0
    detokenized: float = 0.0


class ControlReply(Message, tag=3):
    """One engine's, to the item with this ticket."""

    ticket: int
    ok: bool
    message: str


class TreeReply(Message, tag=4):
    ticket: int
    nodes: tuple[tuple[int, int, int, int, Ids], ...]  # radix.outline.NodeOutline


Reply = ControlReply | TreeReply

# ---- main process -> HTTP workers, and back -------------------------------------------------------------------------


class AbortNamed(Message, tag=5):
    """All requests of this worker whose name begins so, or all."""

    ticket: int
    name: str | None
    message: str


class UseWeights(Message, tag=6):
    """What answers say of the weights that the engines have now."""

    ticket: int
    path: str
    version: str


class ConfigureLogging(Message, tag=7):
    """None leaves a value as it is."""

    ticket: int
    level: str | None = None
    requests: bool | None = None
    requests_level: int | None = None


class ShowWorker(Message, tag=8):
    ticket: int


class EngineFailed(Message, tag=9):
    reason: str


class WorkerReply(Message, tag=10):
    """To any item with a ticket; `counts` and `requests`, as JSON, are for who has asked to see them."""

    ticket: int
    counts: bytes = b""
    requests: bytes = b""


Order = AbortNamed | UseWeights | ConfigureLogging | ShowWorker | EngineFailed

FrontendItem = TextBatch | Reply | Order | WorkerReply
