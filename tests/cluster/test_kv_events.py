"""KV events tell a router what is cached: an index built from them alone has the tree's blocks, at every step."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from shared.kv_subscriber import Index, Subscriber, expected_prefixes
from shared.simulation import Simulation, asked_again, random_simulation, settings_of

from radix import Ledger
from srt.board import Board, RankRecord
from srt.cluster.kv_events import BlockEvents, Changes, PageLog
from srt.cluster.publisher import Publisher
from srt.config import ConfigError, KvEventsConfig
from srt.scheduler.assembly import assemble
from srt.scheduler.scheduler import Scheduler

SEEDS = (*range(16), *range(1056, 1065), 1080)


class FollowedLog(PageLog):
    """Compares an index that hears each step's events with the tree."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, self._hear)
        self.index = Index()
        self.names: list[str] = []
        self.ledger: Ledger | None = None
        self._events = BlockEvents(page_size)

    def _hear(self, data: bytes) -> None:
        for change in msgspec.msgpack.decode(data, type=Changes).changes:
            event = self._events.of(change)
            if event is None:
                continue
            name, fields = event
            self.names.append(name)
            self.index.take({"type": name, **fields})

    def step(self) -> None:
        super().step()
        if self.ledger is not None:
            assert self.index.prefixes() == expected_prefixes(self.ledger)


def run(simulation: Simulation, page_log: PageLog, folder: str) -> Scheduler:
    """The simulation's workload through a scheduler whose tree is observed."""
    scheduler = assemble(
        settings_of(simulation.setting),
        executor=simulation.executor,
        intake=simulation.intake,
        outlet=simulation.outlet,
        record=RankRecord(Board.create(f"{folder}/board", 1), 0),
        grammars=simulation.grammars,
        page_log=page_log,
    )
    simulation.intake.stop = lambda: setattr(scheduler, "stopped", True)
    if isinstance(page_log, FollowedLog):
        page_log.ledger = scheduler._ledger
    scheduler.run()
    assert len(simulation.outlet.finishes) == len(simulation.requests)
    return scheduler


def workload(seed: int) -> Simulation:
    """Prompts that share stems, in two namespaces, with aborts, flushes, evictions and, if tight, retractions."""
    drawn, _ = random_simulation(seed, tight=seed >= 1000)
    setting = dataclasses.replace(drawn.setting, cache=True, host_pages=(0, 20)[seed % 2])
    return Simulation(setting, asked_again(drawn.script) if setting.host_pages else drawn.script)


def test_an_index_follows_the_tree_at_every_step(tmp_path):
    names, evicted, retractions, restored = [], 0, 0, 0
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        simulation = workload(seed)
        log = FollowedLog(simulation.setting.page_size)
        scheduler = run(simulation, log, str(folder))
        names += log.names
        evicted += scheduler._ledger.evicted_total
        retractions += scheduler._planner.retractions
        restored += sum(opening.restored_tokens for opening in simulation.outlet.openings.values())
    assert restored > 0
    assert evicted > 0
    assert retractions > 0
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == {*names}


def test_a_scheduler_decides_alike_with_events_and_without(tmp_path):
    simulation = workload(1003)
    log = FollowedLog(simulation.setting.page_size)
    run(simulation, log, str(tmp_path))
    plain = workload(1003).run()
    assert [batch.slots.tolist() for batch in simulation.executor.batches] == [
        batch.slots.tolist() for batch in plain.executor.batches
    ]


# ---- over sockets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as path:  # short enough for a socket's address
        yield path


class Engine:
    """A ledger whose pages are published, in a pool that holds few prompts. Every prompt is a step."""

    def __init__(self, config: KvEventsConfig, dp_rank: int = 0) -> None:
        self.publisher = Publisher(config, dp_rank, 16)
        self.ledger = Ledger(num_pages=20, page_size=16, num_rows=2, context_length=128, observer=self.publisher.log)
        self.steps = 0
        self._rng = random.Random(7)

    def serve(self, requests: int) -> None:
        rng = self._rng
        for _ in range(requests):
            prompt = [rng.randrange(3)] * 32 + [rng.randrange(2) for _ in range(64)]
            key = np.array(prompt, "<i4").tobytes()
            self.ledger.close(self.ledger.open(rng.choice((b"", b"a", b"b")), key, 96), key)
            self.publisher.log.step()
            self.steps += 1


def config_of(folder: str, **fields: Any) -> KvEventsConfig:
    return KvEventsConfig(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay", **fields)


@pytest.mark.parametrize("event_encoding", ["map", "array"])
def test_a_subscriber_rebuilds_the_tree_from_the_stream_and_the_replay(folder, event_encoding):
    """One that hears almost all of it as it happens, and one that comes late and asks for what it has missed."""
    config = config_of(folder, event_encoding=event_encoding, topic="kv@host@model")
    engine = Engine(config, dp_rank=3)
    addresses = config.endpoint_of(3), config.replay_endpoint_of(3)
    assert addresses == (f"ipc://{folder}/pub_dp3", f"ipc://{folder}/replay_dp3")
    early = Subscriber(*addresses, config.topic)
    try:
        while not early.hear(50):
            engine.serve(1)
        engine.serve(50)
        late = Subscriber(*addresses, config.topic)
        while late.next_number < engine.steps:  # the publisher is on its way
            late.replay()
        engine.ledger.flush()
        engine.serve(20)
        for subscriber in (early, late):
            while subscriber.next_number < engine.steps:
                subscriber.hear(100) or subscriber.replay()
            assert subscriber.index.prefixes() == expected_prefixes(engine.ledger)
            assert subscriber.dp_ranks == [3]
        assert engine.ledger.evicted_total > 0
        late.close()
    finally:
        early.close()
        engine.publisher.close()


def test_a_replay_is_of_what_the_buffer_still_has(folder):
    config = config_of(folder, buffer_steps=10)
    engine = Engine(config)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(config.replay_endpoint)

    def replayed(start: int) -> list[int]:
        socket.send_multipart((b"", start.to_bytes(8, "big", signed=True)))
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert socket.poll(20_000)
            numbers.append(int.from_bytes(socket.recv_multipart()[2], "big", signed=True))
        return numbers[:-1]

    try:
        engine.serve(30)
        socket.send_multipart((b"", b"not a number"))
        socket.send(b"no delimiter")
        while replayed(29) != [29]:  # the publisher is on its way
            pass
        assert replayed(0) == replayed(-1) == [*range(20, 30)]
        assert replayed(27) == [27, 28, 29]
        assert replayed(30) == replayed(99) == []
    finally:
        context.destroy(linger=0)
        engine.publisher.close()


def test_an_address_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match="ipc:///nowhere/at/all cannot be used"):
        Publisher(KvEventsConfig(endpoint="ipc:///nowhere/at/all"), 0, 16)
