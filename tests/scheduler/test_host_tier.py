"""Evicted prefixes in host memory: what comes back is what was there, on every rank, and nothing waits for a copy."""

from __future__ import annotations

import dataclasses
import random

import pytest
from shared.simulation import VOCAB, Setting, Simulation, asked_again, random_simulation, request


def chats(host_pages: int, page_size: int = 1, **fields) -> Simulation:
    """Six prompts of 40 tokens, again and again, in a pool for two of them."""
    rnd = random.Random(3)
    prompts = [[rnd.randrange(4, VOCAB) for _ in range(40)] for _ in range(6)]
    script = {
        1 + turn * 60: [request(turn * 6 + chat, prompts[chat], 4, ignore_eos=True) for chat in range(6)]
        for turn in range(3)
    }
    setting = Setting(
        page_size=page_size,
        num_pages=112 // page_size,
        token_budget=64,
        max_running=2,
        host_pages=host_pages,
        **fields,
    )
    simulation = Simulation(setting, script).run()
    simulation.check()
    return simulation


@pytest.mark.parametrize(("page_size", "whole"), [(1, 39), (16, 32)])
def test_what_was_evicted_comes_back(page_size, whole):
    simulation = chats(400 // page_size, page_size)
    openings = simulation.outlet.openings
    again = [openings[rid] for rid in range(6, 18)]
    assert [opening.cached_tokens for opening in again] == [whole] * 12
    assert sum(opening.restored_tokens for opening in again) > 6 * whole
    assert all(opening.restored_tokens <= opening.cached_tokens for opening in again)
    host, copies = simulation.ledger.host, [batch.copies for batch in simulation.executor.batches if batch.copies]
    assert host.restored_total == sum(opening.restored_tokens for opening in openings.values())
    assert host.restored_total == sum(len(copy.loaded_to) for copy in copies)
    assert host.saved_total == sum(len(copy.saved_to) for copy in copies) > host.restored_total
    without = chats(0, page_size).outlet.openings
    assert sum(without[rid].cached_tokens for rid in range(6, 18)) < 6 * whole
    assert all(opening.restored_tokens == 0 for opening in without.values())


def test_what_is_computed_sooner_than_copied_is_computed():
    openings = chats(400, restore_least=1000).outlet.openings
    assert all(opening.restored_tokens == 0 for opening in openings.values())


@pytest.mark.parametrize("seeds", [range(1000, 1015), range(1015, 1030)])
def test_random_workloads_with_host_memory(seeds):
    """In two simulations, as on two ranks: all outputs are the reference's, and all plans and copies the same."""
    saved = loaded = retractions = 0
    for seed in seeds:
        drawn, aborted = random_simulation(seed, tight=True)
        rnd = random.Random(seed)
        host = {"host_pages": (2, 30, 300)[seed % 3], "restore_least": rnd.choice((1, 1, 5)), "cache": True}
        setting = dataclasses.replace(drawn.setting, **host)
        print(f"seed {seed}: {setting}")
        plans = []
        for _ in range(2):
            simulation = Simulation(setting, asked_again(drawn.script)).run()
            simulation.check(aborted)
            batches = simulation.executor.batches
            plans.append([(b.slots.tobytes(), *(a.tobytes() for a in b.copies or ())) for b in batches])
        assert plans[0] == plans[1]
        saved += sum(len(batch.copies.saved_to) for batch in batches if batch.copies)
        loaded += sum(len(batch.copies.loaded_to) for batch in batches if batch.copies)
        retractions += simulation.planner.retractions
    assert saved > loaded > 0
    assert retractions > 0
