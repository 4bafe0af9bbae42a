"""L2, leader: a log of all that a run's decisions follow from, and of the decisions, and how it is replayed.

The log begins with the scheduler's `Settings`; then comes what each step heard, decided and sampled, in the order in
which it happened. Replaying it needs no model, no clock and one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from srt.board import Decision
from srt.config import ConfigError
from srt.messages import Grammar, Ids, Inbox, Message, pack_ids, unpack_ids
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.interfaces import Drafter, Executor, Grammars, Intake, Record
from srt.scheduler.outlet import SilentOutlet
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Accepted, Draft, Logprobs, ScheduleBatch, StepResult, TokenMasks


class Heard(Message, tag=1):
    inbox: Inbox


class Decided(Message, tag=2):
    decision: tuple[int, ...]


class Sampled(Message, tag=3):
    tokens: Ids


class Opened(Message, tag=4):
    is_ready: bool  # the grammar of a request that came


class Waited(Message, tag=5):
    requests: tuple[tuple[int, str], ...]  # for a grammar that is there now: rid, and why it is not served if so


class Followed(Message, tag=6):
    """What a grammar said of a token."""

    ends: bool
    fault: str


class Followable(Message, tag=7):
    drafts: bool  # whether a drafter follows a request that came


class Drafted(Message, tag=8):
    tokens: Ids
    certain: int


Entry = Heard | Decided | Sampled | Opened | Waited | Followed | Followable | Drafted


class InboxLog:
    """Each message is preceded by its length, and on its way to the disk once it is written; first the `Settings`."""

    def __init__(self, path: str) -> None:
        """ConfigError, as by `write`, if there can be no such file."""
        self._path = path
        with self._named_errors():
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed when the process ends)
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, message: Message) -> None:
        data = self._encoder.encode(message)
        left = memoryview(len(data).to_bytes(4, "little") + data)
        with self._named_errors():
            while left:  # a disk takes what it has room for before it refuses
                left = left[self._file.write(left) :]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--inbox-log {self._path} cannot be written: {error.strerror}") from None


class LoggedIntake:
    def __init__(self, inner: Intake, log: InboxLog) -> None:
        self._inner = inner
        self._log = log

    def next(self, wait: bool) -> Inbox:
        inbox = self._inner.next(wait)
        self._log.write(Heard(inbox))
        return inbox


class LoggedRecord:
    def __init__(self, inner: Record, log: InboxLog) -> None:
        self.gauges = inner.gauges
        self._inner = inner
        self._log = log

    def step(self, decision: Decision) -> None:
        self._log.write(Decided(tuple(decision)))
        self._inner.step(decision)


class LoggedExecutor:
    def __init__(self, inner: Executor, log: InboxLog) -> None:
        self.forward = inner.forward
        self.sample = inner.sample
        self._inner = inner
        self._log = log

    def result(self, launched: Any) -> StepResult:
        result = self._inner.result(launched)
        self._log.write(Sampled(result.tokens.astype("<i4").tobytes()))
        return result


class LoggedGrammars:
    def __init__(self, inner: Grammars, log: InboxLog) -> None:
        self.masks = inner.masks
        self.drop = inner.drop
        self._inner = inner
        self._log = log

    def open(self, rid: int, grammar: Grammar, ignore_eos: bool) -> bool:
        is_ready = self._inner.open(rid, grammar, ignore_eos)
        self._log.write(Opened(is_ready))
        return is_ready

    def ready(self, serial: int) -> list[tuple[int, str]]:
        waited = self._inner.ready(serial)
        self._log.write(Waited(tuple(waited)))
        return waited

    def accept(self, rid: int, token: int) -> Accepted:
        accepted = self._inner.accept(rid, token)
        self._log.write(Followed(*accepted))
        return accepted


class LoggedDrafter:
    def __init__(self, inner: Drafter, log: InboxLog) -> None:
        self._inner = inner
        self._log = log

    def follows(self, request: Request) -> bool:
        drafts = self._inner.follows(request)
        self._log.write(Followable(drafts))
        return drafts

    def draft(self, request: Request) -> Draft:
        draft = self._inner.draft(request)
        self._log.write(Drafted(pack_ids(draft.tokens), draft.certain))
        return draft


# ---- replay ---------------------------------------------------------------------------------------------------------


class Difference(Exception):
    """The replay decided otherwise than the run."""


class EndOfLog(Exception):
    pass


def replay(path: str) -> int:
    """Takes every decision again; the number of steps. Difference for the first one that comes out otherwise."""
    replayed = _Replay(path)
    scheduler = assemble(
        replayed.settings,
        executor=replayed,
        intake=replayed,
        outlet=SilentOutlet(),
        record=replayed,
        grammars=_ReplayedGrammars(replayed.take),
        drafter=_ReplayedDrafter(replayed.take),
    )
    try:
        scheduler.run()
    except EndOfLog:
        return replayed.steps
    raise AssertionError("a scheduler ends only with its inboxes")


class _Replay:
    """Intake, executor and record in one: all take from the log what the run's had put there."""

    def __init__(self, path: str) -> None:
        self.steps = 0
        self._messages = _messages(path)
        self.settings = msgspec.msgpack.decode(next(self._messages), type=Settings)
        self._decoder = msgspec.msgpack.Decoder(Entry)

    def take(self, kind: type) -> Any:
        """EndOfLog where the run ended; Difference if it did something else here."""
        data = next(self._messages, None)
        if data is None:
            raise EndOfLog
        entry = self._decoder.decode(data)
        if not isinstance(entry, kind):
            was, now = type(entry).__name__.lower(), kind.__name__.lower()
            raise Difference(f"step {self.steps}: the run {was} where the replay {now}")
        return entry

    def next(self, wait: bool) -> Inbox:
        inbox = self.take(Heard).inbox
        self.steps = inbox.number
        return inbox

    def step(self, decision: Decision) -> None:
        logged = Decision(*self.take(Decided).decision)
        for name, was, now in zip(Decision._fields, logged, decision, strict=True):
            if was != now and name != "digest":
                raise Difference(f"step {self.steps}, {name}: {was:x} in the run, {now:x} in the replay")
        if logged.digest != decision.digest:
            raise Difference(f"step {self.steps}: equal, but the digest of all that went before is not")

    def gauges(self, **values: int) -> None:
        pass

    def forward(self, batch: ScheduleBatch) -> ScheduleBatch:
        return batch

    def sample(self, launched: ScheduleBatch, masks: TokenMasks | None) -> None:
        pass

    def result(self, launched: ScheduleBatch) -> StepResult:
        """Log-probabilities decide nothing, so they are not in the log."""
        tokens = np.frombuffer(self.take(Sampled).tokens, "<i4")
        if len(tokens) != launched.samples.sum():
            raise Difference(f"step {self.steps}: the run sampled {len(tokens)} tokens")
        none = np.zeros((len(tokens), 0))
        return StepResult(tokens, Logprobs(np.zeros(len(tokens)), none, none, none))


class _ReplayedGrammars:
    """What they allowed decided what was sampled, and that is in the log."""

    def __init__(self, take: Callable[[type], Any]) -> None:
        self._take = take

    def open(self, rid: int, grammar: Grammar, ignore_eos: bool) -> bool:
        return self._take(Opened).is_ready

    def ready(self, serial: int) -> list[tuple[int, str]]:
        return list(self._take(Waited).requests)

    def masks(self, places: list[int], rids: list[int], drafts: Mapping[int, Draft]) -> None:
        return None

    def accept(self, rid: int, token: int) -> Accepted:
        followed = self._take(Followed)
        return Accepted(followed.ends, followed.fault)

    def drop(self, rid: int) -> None:
        pass


class _ReplayedDrafter:
    def __init__(self, take: Callable[[type], Any]) -> None:
        self._take = take

    def follows(self, request: Request) -> bool:
        return self._take(Followable).drafts

    def draft(self, request: Request) -> Draft:
        drafted = self._take(Drafted)
        return Draft(tuple(unpack_ids(drafted.tokens)), drafted.certain)


def _messages(path: str) -> Iterator[bytes]:
    """A message that a dying process could not finish is left out."""
    with Path(path).open("rb") as file:
        while len(head := file.read(4)) == 4:
            length = int.from_bytes(head, "little")
            if len(data := file.read(length)) < length:
                return
            yield data
