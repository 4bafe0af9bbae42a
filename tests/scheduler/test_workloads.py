"""Random workloads: every output equals what the request would get alone, and nothing is left behind."""

from __future__ import annotations

import pytest
from shared.simulation import Simulation, random_simulation

import srt.scheduler.planner

SEEDS, PER_TEST = 240, 60


def simulate(seed: int, **changes) -> Simulation:
    simulation, aborted = random_simulation(seed, **changes)
    print(f"seed {seed}: {simulation.setting}")  # pytest shows it when the test fails
    simulation.run().check(aborted)
    return simulation


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_outputs_equal_the_reference(first):
    for seed in range(first, first + PER_TEST):
        simulate(seed)


@pytest.mark.parametrize("first", range(1000, 1000 + SEEDS, PER_TEST))
def test_outputs_equal_the_reference_when_memory_runs_out(first, monkeypatch):
    """Nothing is reserved for running requests, the pool holds little more than one: they retract each other."""
    for name in ("RESERVE_START", "RESERVE_LEAST", "RESERVE_JUMP"):
        monkeypatch.setattr(srt.scheduler.planner, name, 0)
    runs = [simulate(seed, tight=True) for seed in range(first, first + PER_TEST)]
    assert sum(run.planner.retractions > 0 for run in runs) > PER_TEST / 3
    for run in runs:
        reported = sum(finish.num_retractions for finish in run.outlet.finishes.values())
        assert reported == run.planner.retractions == run.scheduler._planner.retractions
