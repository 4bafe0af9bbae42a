"""A million requests, as many as hours bring, through one scheduler: the books balance all the time, and at the end."""

from __future__ import annotations

import random

import msgspec
import pytest
from shared.simulation import VOCAB, Setting, Simulation, reference
from shared.simulation import request as make_request

import srt.scheduler.planner
from radix import check_ledger
from srt.config import SCHEDULE_POLICIES
from srt.messages import AbortRequest, FlushCache, Inbox, NewRequest, TokenBatch, unpack_ids

MOST_UNDER_WAY = 80
CHECKED_STEPS, CHECKED_REQUESTS = 200, 97  # every so many


class Counted:
    """What a list of batches is used for, without keeping them."""

    def __init__(self) -> None:
        self._length = 0

    def append(self, batch: object) -> None:
        self._length += 1

    def __len__(self) -> int:
        return self._length


class Traffic:
    """Intake and outlet of random traffic: bursts and lulls of new prompts and chats; some are aborted."""

    holds = False

    def __init__(self, seed: int, num_requests: int) -> None:
        self.number = 0
        self.finished = self.aborted = self.retractions = self.flushes = self.rid = 0
        self.simulation: Simulation
        self._left = num_requests
        self._rnd = random.Random(seed)
        self._stems = [[self._rnd.randrange(VOCAB) for _ in range(12)] for _ in range(40)]
        self._messages: dict[int, NewRequest] = {}
        self._outputs: dict[int, list[int]] = {}
        self._rate = 1.0

    def next(self, wait: bool) -> Inbox:
        self.number += 1
        if self.number % CHECKED_STEPS == 0:
            check_ledger(self.simulation.ledger)
        rnd, items = self._rnd, []
        if rnd.random() < 0.01:
            self._rate = rnd.choice((0.0, 0.5, 4.0, 12.0, 40.0))
        for _ in range(rnd.randrange(int(2 * self._rate) + 2)):
            if self._left and len(self._messages) < MOST_UNDER_WAY:
                items.append(self._new())
        if self._messages and rnd.random() < 0.1:
            rid = rnd.choice(list(self._messages))
            items.append(AbortRequest(rid, "gone"))
        if rnd.random() < 0.01:
            items.append(FlushCache(self.number, 0.05))
        self.simulation.scheduler.stopped = wait and not items and not self._left
        return Inbox(self.number, self.number * 0.01, tuple(map(msgspec.msgpack.encode, items)))

    def _new(self) -> NewRequest:
        rnd = self._rnd
        self._left -= 1
        self.rid += 1
        stem = rnd.choice(self._stems)
        prompt = (stem[: rnd.randrange(1, 13)] + [rnd.randrange(VOCAB) for _ in range(rnd.randrange(4))])[:28]
        max_new, namespace = rnd.choice((1, 2, 3, 5, 16)), rnd.choice((b"", b"", b"", b"\x01"))
        message = make_request(self.rid, prompt, max_new, namespace=namespace, priority=rnd.choice((0, 0, 3, -1)))
        self._messages[self.rid], self._outputs[self.rid] = message, []
        return message

    def tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            self._outputs[delta.rid] += unpack_ids(delta.ids)
            if delta.finish is None:
                continue
            message, output = self._messages.pop(delta.rid), self._outputs.pop(delta.rid)
            self.retractions += delta.finish.num_retractions
            if delta.finish.reason == "abort":
                self.aborted += 1
            else:
                self.finished += 1
                if delta.rid % CHECKED_REQUESTS == 0:
                    assert output == reference(message, self.simulation.setting).tokens
            if self._rnd.random() < 0.3:  # the chat goes on
                stem = [*unpack_ids(message.ids), *output][:24]
                self._stems[self._rnd.randrange(len(self._stems))] = stem + [7] * (12 - len(stem))

    def reply(self, message: object) -> None:
        self.flushes += message.ok

    def release(self, step: int) -> None:
        pass


def run(policy: str, page_size: int, num_requests: int) -> Traffic:
    setting = Setting(
        page_size=page_size,
        num_pages=192 // page_size,
        context_length=48,
        token_budget=96,
        max_running=24,
        policy=policy,
    )
    simulation = Simulation(setting, {})
    traffic = Traffic(1, num_requests)
    traffic.simulation = simulation
    simulation.executor.batches = Counted()
    simulation.scheduler._intake = simulation.scheduler._outlet = traffic
    simulation.observer.step = simulation.consensus.step = lambda *_: None
    simulation.run()
    check_ledger(simulation.ledger)
    assert traffic.finished + traffic.aborted == num_requests
    assert simulation.ledger.free_tokens + simulation.ledger.cached_tokens == simulation.ledger.capacity
    assert not simulation.planner.running
    assert not simulation.planner.waiting
    print(policy, page_size, {name: value for name, value in vars(traffic).items() if type(value) is int})
    return traffic


@pytest.fixture(autouse=True)
def nothing_reserved(monkeypatch):
    """So that memory runs out."""
    for name in ("RESERVE_START", "RESERVE_LEAST", "RESERVE_JUMP"):
        monkeypatch.setattr(srt.scheduler.planner, name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_million_requests(policy, page_size):
    """An eighth of them under each setting."""
    assert run(policy, page_size, 125_000).retractions > 100


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_a_thousand_requests(policy):
    assert run(policy, 1, 1000).finished > 800
