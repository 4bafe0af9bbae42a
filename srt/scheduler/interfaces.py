"""L2, each rank: the seams of the scheduler. Everything it does not decide itself stands behind one of these.

Each Protocol has a fake in `tests/shared/`, so that scheduler and ledger are tested without a model or a process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from radix import PageObserver
from srt.board import Decision
from srt.messages import Grammar, Inbox, Reply, TokenBatch
from srt.scheduler.planner import Plan
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Accepted, Draft, ScheduleBatch, StepResult, TokenMasks


class Executor(Protocol):
    """The model and its K/V. Steps take effect in the order of their launch, as on one CUDA stream.

    For one batch the scheduler calls forward, then sample, then result, each once; the next batch's forward may come
    before this one's result.
    """

    def forward(self, batch: ScheduleBatch) -> Any:
        """Launches the step and returns at once with a handle for the two calls below."""

    def sample(self, launched: Any, masks: TokenMasks | None) -> None:
        """Launches sampling of the rows that sample; their tokens enter the token table."""

    def result(self, launched: Any) -> StepResult:
        """Waits until the step's values are on the CPU."""


class Intake(Protocol):
    """Where inboxes come from: the leader's socket, or its broadcast."""

    def next(self, wait: bool) -> Inbox:
        """The next inbox, perhaps an empty one; with `wait` once there is something to hear, or a second has passed."""


class Outlet(Protocol):
    """Where results go. On followers nothing leaves."""

    @property
    def holds(self) -> bool:
        """Whether something waits to be released, so that the loop must not sleep yet."""

    def tokens(self, batch: TokenBatch) -> None:
        """What a step gave; a batch without deltas need not be sent."""

    def reply(self, message: Reply) -> None: ...

    def release(self, step: int) -> None:
        """This rank's decision of `step` is on the board: what earlier steps gave may leave once all ranks agree."""


class Grammars(Protocol):
    """State of every constrained request, keyed by rid. All that it answers follows from the calls."""

    def open(self, rid: int, grammar: Grammar, ignore_eos: bool) -> bool:
        """Takes a constrained request; False if it must wait until `ready` names it."""

    def ready(self, serial: int) -> list[tuple[int, str]]:
        """An inbox has it that all ranks are done with a grammar: who waited for it, and why it is not served if so."""

    def masks(self, places: list[int], rids: list[int], drafts: Mapping[int, Draft]) -> TokenMasks:
        """For what these requests, constrained and ready, sample in a step, their first tokens at `places`.

        One of the `drafts`, by rid, brings tokens that follow the accepted ones, and asks for a mask behind the certain
        ones and behind each of the others, as if they had been accepted; what is allowed behind one that the grammar
        forbids matters to nobody.
        """

    def accept(self, rid: int, token: int) -> Accepted:
        """Advances by one committed token."""

    def drop(self, rid: int) -> None:
        """The request is gone."""


class Drafter(Protocol):
    """Guesses what requests will say, so that one step can check several tokens. All follows from the calls."""

    def follows(self, request: Request) -> bool:
        """Whether it may have drafts for this request; asked once, when it comes."""

    def draft(self, request: Request) -> Draft:
        """What is expected behind the committed tokens; asked whenever there are new ones, while a step is computed."""


class Forcing(Protocol):
    """Grammars that know what they force."""

    def forced(self, rid: int) -> Draft:
        """The tokens that must follow the accepted ones, or the likeliest of those that spell what must."""


class Maintenance(Protocol):
    """What is done to the executor beside serving. A fault is a sentence for the administrator, empty if there is none.

    All ranks are asked the same at the same step; for other weights with nothing in flight.
    """

    def step(self) -> None:
        """A step that computed something is over."""

    def start_profile(self, folder: str, num_steps: int) -> str: ...

    def stop_profile(self) -> str: ...

    def update_weights(self, folder: str | None) -> str:
        """On all ranks, or on none. Without a `folder` those before the last ones."""


class Record(Protocol):
    """Where a rank shows itself: its record on the board."""

    def step(self, decision: Decision) -> None: ...

    def gauges(self, **values: int) -> None: ...


class PageLog(PageObserver, Protocol):
    """Takes down what enters and leaves the tree; nothing is decided by it, so only the leader may have one."""

    def step(self) -> None:
        """The step is over."""


class Consensus(Protocol):
    """Writes what this rank decided to the board, before the step's first collective."""

    def step(self, inbox: Inbox, plan: Plan | None) -> None: ...


class Observer(Protocol):
    """Shows how the ledger stands after a step, and who waits."""

    def step(self, unready: Collection[Request]) -> None:
        """`unready` wait for their grammars, and so are not in the queue yet."""
