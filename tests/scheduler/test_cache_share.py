"""How much memory requests leave to the cache: nothing where it saves nothing, and never so much that nobody runs."""

from __future__ import annotations

import random

import pytest
from shared.simulation import Setting, Simulation, random_simulation, request

import srt.scheduler.cache_share
from srt.scheduler.cache_share import MOST, CacheShare

CAPACITY = 100_000


def free_of(share: CacheShare) -> float:
    """The share of the pool that must be free for another request to run."""
    return next(part for part in range(101) if share.spares(part * CAPACITY // 100)) / 100


def test_a_cache_that_saves_nothing_gets_nothing():
    share = CacheShare(CAPACITY)
    for _ in range(100):
        share.step()
        share.admitted(revived=0, computed=500)
    assert free_of(share) == 0


def test_the_share_follows_what_is_saved_and_forgets_it():
    share = CacheShare(CAPACITY)
    seen = []
    for revived in (300, 0):
        for _ in range(1000):
            share.admitted(revived, computed=1000 - revived)
        seen.append(free_of(share))
    assert seen == [pytest.approx(0.45, abs=0.02), pytest.approx(0, abs=0.02)]


def test_steps_that_compute_little_make_running_few_requests_dear():
    chats, writers = CacheShare(CAPACITY), CacheShare(CAPACITY)
    for _ in range(200):
        for share, steps in ((chats, 1), (writers, 20)):
            share.admitted(revived=900, computed=100)
            for _ in range(steps):
                share.step()
    assert free_of(chats) == MOST
    assert free_of(writers) < MOST / 2


def turns(policy: str) -> Simulation:
    """Eight chats whose questions come at random times, in a pool for three of them."""
    rnd = random.Random(5)
    stems = [[rnd.randrange(40) for _ in range(60)] for _ in range(8)]
    script: dict[int, list] = {}
    for rid in range(160):
        length = min(60, 20 + rid // 8 * 2)
        script.setdefault(1 + rid, []).append(request(rid, stems[rnd.randrange(8)][:length], 2, ignore_eos=True))
    setting = Setting(num_pages=200, max_running=8, token_budget=16, policy=policy)
    simulation = Simulation(setting, script).run()
    simulation.check()
    return simulation


def test_only_the_order_that_serves_the_cached_first_holds_back(monkeypatch):
    monkeypatch.setattr(srt.scheduler.cache_share, "STEP_TOKENS", 0)
    shared = {policy: turns(policy) for policy in ("fcfs", "lpm")}
    monkeypatch.setattr(srt.scheduler.cache_share, "MOST", 0.0)
    alone = {policy: turns(policy) for policy in ("fcfs", "lpm")}
    hits = {p: (shared[p].output.cached_tokens, alone[p].output.cached_tokens) for p in shared}
    assert hits["fcfs"][0] == hits["fcfs"][1]
    assert hits["lpm"][0] > 1.1 * hits["lpm"][1]


@pytest.mark.parametrize("first", [7000, 7020])
def test_random_workloads_end_whatever_share_the_cache_wants(first, monkeypatch):
    """All of the pool, as soon as anything was found in it: every output is what it would be alone."""
    monkeypatch.setattr(srt.scheduler.cache_share, "STEP_TOKENS", 0)
    monkeypatch.setattr(srt.scheduler.cache_share, "SHARE_PER_SAVING", 1e9)
    monkeypatch.setattr(srt.scheduler.cache_share, "MOST", 1.0)
    for seed in range(first, first + 20):
        simulation, aborted = random_simulation(seed)
        print(f"seed {seed}: {simulation.setting}")
        simulation.run().check(aborted)
