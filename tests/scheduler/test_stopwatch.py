"""The stopwatch dates what leaves, changes nothing else, and forgets who is gone."""

from __future__ import annotations

import time

from shared.simulation import random_simulation

from srt.messages import TokenBatch
from srt.scheduler.stopwatch import Stopwatch


class Batches:
    """An outlet that keeps what passes through to another."""

    holds = False

    def __init__(self, inner):
        self.batches: list[TokenBatch] = []
        self.reply, self.release = inner.reply, inner.release
        self._inner = inner

    def tokens(self, batch):
        if batch.deltas:
            self.batches.append(batch)
        self._inner.tokens(batch)


def test_what_leaves_is_dated_and_otherwise_the_same():
    assert sum(map(run_and_check, range(20))) > 50


def run_and_check(seed):
    """How many requests had tokens."""
    simulation, aborted = random_simulation(seed, tight=seed % 2 == 1)
    outlet = Batches(simulation.outlet)
    watch = Stopwatch(simulation.executor, outlet)
    scheduler = simulation.scheduler
    scheduler._executor = scheduler._outlet = watch
    began = time.monotonic()
    simulation.run()
    ended = time.monotonic()
    simulation.check(aborted)
    assert not watch._starts

    computed = [batch.computed for batch in outlet.batches if any(delta.ids for delta in batch.deltas)]
    assert computed == sorted(computed)
    assert all(began <= when <= ended for when in computed)
    opened = 0
    for batch in outlet.batches:
        for delta in batch.deltas:
            if delta.opening is not None and delta.ids:
                started = delta.opening.started
                assert began <= started.admitted <= started.launched <= batch.computed
                opened += 1
    return opened
