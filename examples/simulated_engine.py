"""A real scheduler with its ledger around a device that computes nothing, and clients that keep it busy.

The device has a clock of its own, on which a step takes about what it takes an 8B model on an H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from examples.workloads import Conversation
from radix import check_ledger
from srt.messages import Inbox, NewRequest, SamplingParams, TokenBatch, pack_ids
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.interfaces import Executor
from srt.scheduler.outlet import SilentOutlet
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.scheduler.scheduler import Scheduler

STEP_SECONDS, ROW_SECONDS, TOKEN_SECONDS = 0.004, 0.00005, 0.000024
COPY_SECONDS = 0.0000026  # of a token's 128 KiB from host memory, at 50 GB/s
ROWS, BUDGET, CONTEXT = 256, 8192, 4096
VOCABULARY = 30_000


class Clock(Executor, Protocol):
    """An executor that knows the time, in seconds, and how many steps it has made."""

    clock: float
    steps: int


class Device:
    """An `Executor` whose steps take time on `clock` alone. What it samples depends on row and position."""

    def __init__(self) -> None:
        self.clock = 0.0  # seconds
        self.steps = 0

    def forward(self, batch: ScheduleBatch) -> ScheduleBatch:
        prompt_tokens = batch.num_tokens - batch.num_decode
        loaded = 0 if batch.copies is None else len(batch.copies.loaded_to)
        self.clock += (
            COPY_SECONDS * loaded + STEP_SECONDS + ROW_SECONDS * batch.num_rows + TOKEN_SECONDS * prompt_tokens
        )
        self.steps += 1
        return batch

    def sample(self, launched: ScheduleBatch, masks: TokenMasks | None) -> None:
        pass

    def result(self, launched: ScheduleBatch) -> StepResult:
        ends, rows = launched.sampled_positions, launched.sampled_rows
        return StepResult(((ends * 7919 + rows * 104_729) % VOCABULARY).astype(np.int32))


class Record:
    """Nobody looks at this board."""

    def step(self, decision: object) -> None:
        pass

    def gauges(self, **values: int) -> None:
        pass


class EncodingOutlet(SilentOutlet):
    """Does with tokens what it costs to send them, and no more."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def tokens(self, batch: TokenBatch) -> None:
        self._encoder.encode(batch)


@dataclass
class Served:
    """One request as it was served."""

    chat: int
    turn: int
    prompt: list[int]
    cached: int = 0
    output: list[int] = field(default_factory=list)


class Clients:
    """Intake and outlet: `concurrency` requests are under way as long as there are chats that go on.

    A chat's next turn is its history and `prompts[turn]`. Whose turn is next is drawn at random.
    """

    def __init__(self, chats: Sequence[Conversation], concurrency: int, device: Clock) -> None:
        self.served: list[Served] = []  # by rid
        self.events: list[tuple[int, bool]] = []  # rids as they got their first token, and as they got their last
        self.scheduler: Scheduler
        self.holds = False
        self._chats = chats
        self._history: list[list[int]] = [[] for _ in chats]
        self._turns = [0] * len(chats)
        self._ready = list(range(len(chats)))
        self._free = concurrency
        self._number = 0
        self._device = device
        self._random = random.Random(1)

    def next(self, wait: bool) -> Inbox:
        self._number += 1
        items = []
        while self._free and self._ready:
            self._free -= 1
            place = self._random.randrange(len(self._ready)) if self._turns_left else 0
            items.append(self._ask(self._ready.pop(place)))
        self.scheduler.stopped = wait and not items
        return Inbox(self._number, self._device.clock, tuple(map(msgspec.msgpack.encode, items)))

    @property
    def _turns_left(self) -> bool:
        return len(self._chats[0].prompts) > 1

    def _ask(self, chat: int) -> NewRequest:
        turn = self._turns[chat]
        history = self._history[chat]
        history += self._chats[chat].prompts[turn]
        rid = len(self.served)
        self.served.append(Served(chat, turn, list(history)))
        return NewRequest(rid, pack_ids(history), SamplingParams(self._chats[chat].output_lens[turn], ignore_eos=True))

    def tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            served = self.served[delta.rid]
            if delta.opening is not None:
                self.events.append((delta.rid, True))
                served.cached = delta.opening.cached_tokens
            served.output += np.frombuffer(delta.ids, np.int32).tolist()
            if delta.finish is not None:
                self.events.append((delta.rid, False))
                self._free += 1
                self._history[served.chat] += served.output
                self._turns[served.chat] += 1
                if self._turns[served.chat] < len(self._chats[served.chat].prompts):
                    self._ready.append(served.chat)

    def release(self, step: int) -> None:
        pass

    def reply(self, message: object) -> None:
        pass


@dataclass
class Run:
    clients: Clients
    device: Clock
    scheduler: Scheduler
    seconds: float

    @property
    def served(self) -> list[Served]:
        return self.clients.served

    @property
    def hits(self) -> int:
        return sum(one.cached for one in self.served)

    @property
    def hit_rate(self) -> float:
        return self.hits / sum(len(one.prompt) for one in self.served)

    def hit_rate_of(self, turn: int) -> float:
        ones = [one for one in self.served if one.turn == turn]
        return sum(one.cached for one in ones) / sum(len(one.prompt) for one in ones)


def run(
    chats: Sequence[Conversation],
    policy: str,
    pool_tokens: int,
    concurrency: int,
    before: Callable[[Scheduler], None] = lambda scheduler: None,
    *,
    rows: int = ROWS,
    token_budget: int = BUDGET,
    host_tokens: int = 0,
    device: Clock | None = None,
) -> Run:
    device = Device() if device is None else device
    clients = Clients(chats, concurrency, device)
    settings = Settings(
        num_pages=pool_tokens,
        page_size=1,
        num_rows=rows,
        context_length=CONTEXT,
        cache_enabled=True,
        policy=policy,
        low_priority_first=False,
        token_budget=token_budget,
        overlap=True,
        eos_token_ids=(),
        token_bytes=(b"x",) * VOCABULARY,
        is_special=bytes(VOCABULARY),
        host_pages=host_tokens,
    )
    scheduler = assemble(settings, executor=device, intake=clients, outlet=clients, record=Record())
    clients.scheduler = scheduler
    before(scheduler)
    scheduler.run()
    seconds = device.clock
    check_ledger(scheduler._ledger)
    return Run(clients, device, scheduler, seconds)
