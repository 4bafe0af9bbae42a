"""Several engines behind one door: requests go where their prefix is, unless too much waits there already."""

from __future__ import annotations

import random

import numpy as np
import pytest

from examples.bench_replicas import compare, simulate
from srt.cluster.balancer import RUNNING_COST, CacheAware, RoundRobin, make_balancer


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def prompt(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, length, "<i4").tobytes()


def serve(balancer: CacheAware, namespace: bytes, tokens: bytes, answer: bytes = ids(1, 2, 3)) -> int:
    """The engine that a request runs on from beginning to end, before the next one comes."""
    assignment = balancer.assign(namespace, tokens)
    balancer.heard(assignment, answer)
    balancer.ended(assignment)
    return assignment.engine


def test_round_robin_takes_turns():
    balancer = RoundRobin(3)
    assert [balancer.assign(b"", ids(1)).engine for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_one_engine_needs_no_choice():
    assert isinstance(make_balancer("cache_aware", [1000], 1), RoundRobin)
    assert isinstance(make_balancer("cache_aware", [1000, 1000], 1), CacheAware)
    assert isinstance(make_balancer("round_robin", [1000, 1000], 1), RoundRobin)


@pytest.mark.parametrize("page_size", [1, 16])
def test_conversations_stay_where_they_are(page_size):
    balancer = CacheAware([100_000] * 3, page_size)
    histories = [prompt(seed, 400) for seed in range(9)]
    homes = [serve(balancer, b"", history) for history in histories]
    assert sorted(homes) == [0, 0, 0, 1, 1, 1, 2, 2, 2], "new ones go where the fewest tokens are cached"
    for turn in range(5):
        for number in random.Random(turn).sample(range(9), 9):
            histories[number] += prompt(100 * turn + number, 50)
            answer = prompt(999 * turn + number, 30)
            assert serve(balancer, b"", histories[number], answer) == homes[number]
            histories[number] += answer


def test_an_answer_counts_as_cached():
    balancer = CacheAware([100_000] * 2, 1)
    assert serve(balancer, b"", prompt(1, 10), prompt(2, 500)) == 0
    assert serve(balancer, b"", prompt(3, 600)) == 1
    assert serve(balancer, b"", prompt(3, 100) + prompt(4, 10)) == 1
    assert serve(balancer, b"", prompt(1, 10) + prompt(2, 500)) == 0


def test_a_prefix_is_of_one_namespace():
    balancer = CacheAware([100_000] * 2, 1)
    shared = prompt(1, 500)
    assert serve(balancer, b"a", shared) == 0
    assert serve(balancer, b"b", shared) == 1
    assert serve(balancer, b"a", shared + ids(1)) == 0
    assert serve(balancer, b"b", shared + ids(1)) == 1


def test_requests_without_a_common_prefix_are_spread_by_load():
    balancer = CacheAware([1_000_000] * 4, 1)
    running = [balancer.assign(b"", prompt(seed, 100)) for seed in range(40)]
    assert [sum(r.engine == engine for r in running) for engine in range(4)] == [10] * 4
    for assignment in [r for r in running if r.engine == 2]:
        balancer.ended(assignment)
    assert [balancer.assign(b"", prompt(100 + seed, 100)).engine for seed in range(10)] == [2] * 10


def test_engines_that_keep_no_cache_are_chosen_by_load():
    balancer = make_balancer("cache_aware", [100_000] * 2, 1, cache_enabled=False)
    head = prompt(1, 1000)
    running = [balancer.assign(b"", head + prompt(seed, 10)) for seed in range(2, 8)]
    assert [assignment.engine for assignment in running] == [0, 1] * 3
    for assignment in running:
        balancer.heard(assignment, ids(1))
        balancer.ended(assignment)
    balancer.flushed(0)
    assert balancer.assign(b"", head).engine == 0


def test_a_long_queue_outweighs_a_short_prefix():
    balancer = CacheAware([1_000_000] * 2, 1)
    head = prompt(1, 1000)
    first = balancer.assign(b"", head)
    assert first.engine == 0
    assert balancer.assign(b"", head + prompt(2, 10)).engine == 0, "the prefix is worth more than what is ahead"
    other = balancer.assign(b"", prompt(3, 5000))
    assert other.engine == 1
    balancer.heard(other, ids(1))
    assert balancer.assign(b"", head[:1600] + prompt(4, 10)).engine == 1, "more waits there than it has cached"
    balancer.heard(first, ids(1))
    assert balancer.assign(b"", head[:1600] + prompt(5, 10)).engine == 0, "its prompt is computed by now"


def test_who_runs_is_load_until_it_ends():
    balancer = CacheAware([1_000_000] * 2, 1)
    tokens = prompt(1, 10)
    started = [balancer.assign(b"", tokens) for _ in range(4)]
    for assignment in started:
        balancer.heard(assignment, ids(7))
    assert [assignment.engine for assignment in started] == [0, 1, 0, 1]
    assert [engine.load for engine in balancer._engines] == [2 * RUNNING_COST] * 2
    for assignment in started:
        balancer.ended(assignment)
    assert [engine.load for engine in balancer._engines] == [0, 0]


def test_who_left_before_its_first_token_is_load_no_more():
    balancer = CacheAware([1_000_000] * 2, 1)
    balancer.ended(balancer.assign(b"", prompt(1, 5000)))
    assert [engine.load for engine in balancer._engines] == [0, 0]


def test_the_index_holds_no_more_than_the_engine():
    """And forgets as the engine does: what was used last stays."""
    balancer = CacheAware([2000] * 2, 16)
    kept = prompt(0, 512)
    home = serve(balancer, b"", kept)
    for seed in range(1, 60):
        serve(balancer, b"", prompt(seed, 320))
        assert serve(balancer, b"", kept) == home
        assert all(engine.cache.cached_tokens <= 2000 for engine in balancer._engines)
    assert balancer._engines[home].cache.match(b"", kept).length == 512


def test_a_full_engine_is_not_preferred_to_an_empty_one():
    balancer = CacheAware([2000] * 2, 1)
    system = prompt(0, 100)
    engines = [serve(balancer, b"", system + prompt(seed, 600)) for seed in range(1, 7)]
    assert engines[:3] == [0, 0, 0]
    assert 1 in engines[3:5], "there is room for all there, and the system prompt is short"


def test_after_a_flush_nothing_is_cached_but_what_runs():
    balancer = CacheAware([100_000] * 2, 1)
    first, second = prompt(1, 500), prompt(2, 500)
    running = balancer.assign(b"", first)
    assert (running.engine, serve(balancer, b"", second)) == (0, 1)
    balancer.flushed(0)
    balancer.flushed(1)
    assert [engine.cache.cached_tokens for engine in balancer._engines] == [500, 0]
    balancer.heard(running, ids(1))
    balancer.ended(running)
    balancer.flushed(0)
    assert not balancer._engines[0].cache.roots


@pytest.mark.parametrize("pool", [64_000, 128_000])
def test_two_engines_find_almost_as_much_cached_as_one_of_twice_the_size(pool):
    """On multi-turn chats, with real ledgers: at least 0.95 of its hits, and at most a third of round-robin's loss."""
    result = compare(lambda method, engines: simulate(method, engines, pool, seed=1, conversations=48))
    assert result["of_one"] >= 0.95
    assert result["lost"]["round_robin"] >= 3 * result["lost"]["cache_aware"]
    assert all(0.45 < share < 0.55 for share in result["cache_aware"]["share_of_prompts"])
