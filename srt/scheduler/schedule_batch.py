"""L2 to L4, each rank: the immutable plan of one step, and what came of it. Numpy only.

The scheduler writes a `ScheduleBatch` from the ledger alone: rows, slots and lengths, never a token it does not have
yet. The executor keeps three tables of its own, indexed by row: slots `[rows, context]`, tokens `[rows, context]` and
the sampling parameters; a plan carries only what changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from srt.messages import SamplingParams

NO_TOKENS = np.zeros((3, 0), np.int32)


class Draft(NamedTuple):
    """Tokens that are expected to follow. Of the first `certain` no other could: they need no sampling."""

    tokens: tuple[int, ...] = ()
    certain: int = 0

    @property
    def unsure(self) -> int:
        """How many may be refused."""
        return len(self.tokens) - self.certain


@dataclass(frozen=True, slots=True)
class OpenedRow:
    """A row that got a new tenant: the executor writes its tokens and parameters before the step's rows run."""

    row: int
    tokens: np.ndarray  # int32, all known tokens: the prompt, and after a retraction the output so far
    prompt_len: int  # tokens[prompt_len:] and all that is sampled later are output (penalties count them)
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # EOS included unless ignored: what min_new_tokens forbids
    rid: int = 0  # for who keeps books on requests; the executor knows rows


class SharedPrefix(NamedTuple):
    """Neighbouring decode rows whose first positions have the same slots."""

    rows: int
    tokens: int


class Copies(NamedTuple):
    """What a step copies between pool and host memory before it computes: all that is saved, then all that is loaded.

    All are int32 slots.
    """

    saved_from: np.ndarray  # of the pool
    saved_to: np.ndarray  # of host memory, each but once
    loaded_from: np.ndarray  # of host memory
    loaded_to: np.ndarray  # of the pool, each but once


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """One forward over B rows, decode rows first. All arrays are int32 of length B unless a shape is given.

    Row i computes positions `start[i] .. start[i] + length[i] - 1` of table row `row[i]`; their K/V go to the slots
    that the slot table has for these positions once this plan's `slots` are in it, and they attend to every position
    before. Logits are wanted for positions `first_logit[i] .. start[i] + length[i] - 1`. Behind each of the last
    `samples[i]` a token is sampled, as if all tokens before were right, and written to the token table; at the others
    the known token behind them is rated, for a request that wants logprobs of its prompt.

    The tokens of a row's last positions may be a draft: what is expected there, brought by the plan.
    """

    step: int
    opened: tuple[OpenedRow, ...]
    num_decode: int  # rows [0, num_decode) compute one token each
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first_logit: np.ndarray
    samples: np.ndarray  # 0 or 1; more where a draft is to be checked
    table_start: np.ndarray  # `slots` holds, row after row, the slot table's entries [table_start, start + length)
    slots: np.ndarray  # int32 [sum(start + length - table_start)]
    shared: tuple[SharedPrefix, ...] = ()  # of the first decode rows, one group after the other; whole pages
    num_drafted: int = 0  # rows that compute one token and a draft behind it; they come right behind the decode rows
    # Written to the token table first: int32 [3, D], row, position and token.
    draft: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    copies: Copies | None = None  # between pool and host memory, before the step computes; from the ledger

    @property
    def num_rows(self) -> int:
        return len(self.row)

    @property
    def sampled_rows(self) -> np.ndarray:
        """[S], the table row of each sampled token, in the plan's order."""
        return self.row.repeat(self.samples)

    @property
    def sampled_tokens(self) -> np.ndarray:
        """int64 [S], behind which of the step's tokens each is sampled."""
        last = self.length.cumsum() - self.samples.cumsum()
        return np.arange(int(self.samples.sum())) + last.repeat(self.samples)

    @property
    def sampled_positions(self) -> np.ndarray:
        """int64 [S], where each sampled token will stand."""
        ends = self.start + self.length
        return np.arange(int(self.samples.sum())) + (ends + 1 - self.samples.cumsum()).repeat(self.samples)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens a grammar allows: bit t % 32 of word t // 32 of a row is set where token t is allowed."""

    places: np.ndarray  # int32 [M], ascending: indices into the step's sampled tokens
    bits: np.ndarray  # int32 [M, ceil(vocab / 32)]


class Accepted(NamedTuple):
    """What a grammar says of a committed token."""

    ends: bool  # nothing but EOS could follow
    fault: str = ""  # why the output cannot go on; empty if it can


class Logprobs(NamedTuple):
    """Of the tokens at P positions, each row's by its own wishes; K and A are the most that a row asked for."""

    chosen: np.ndarray  # float32 [P]
    top_ids: np.ndarray  # int32 [P, K], most likely first
    top: np.ndarray  # float32 [P, K]
    asked: np.ndarray  # float32 [P, A], of the row's `logprob_ids`

    def row(self, index: int) -> Logprobs:
        return self.rows(slice(index, index + 1))

    def rows(self, some: slice) -> Logprobs:
        return Logprobs(*(each[some] for each in self))


@dataclass(frozen=True, slots=True)
class StepResult:
    """The values of one step, on the CPU, for its S sampled tokens in the plan's order."""

    tokens: np.ndarray  # int32 [S]
    logprobs: Logprobs | None = None  # of these; None if no row asked
    prompt: Logprobs | None = None  # of the known tokens behind the logits that nothing is sampled from
