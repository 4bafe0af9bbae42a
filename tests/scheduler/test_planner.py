"""What a step computes: priorities, budget, admission and retraction, seen in the plans that the loop makes."""

from __future__ import annotations

import random

import pytest
from shared.simulation import VOCAB, Setting, Simulation
from shared.simulation import request as make_request

import srt.scheduler.planner
from srt.messages import NewRequest


def request(rid: int, prompt: list[int], max_new_tokens: int, seed: int | None = None, priority: int = 0) -> NewRequest:
    """One that ends at its length."""
    return make_request(rid, prompt, max_new_tokens, priority=priority, seed=seed, ignore_eos=True)


def run(setting: Setting, script) -> Simulation:
    done = Simulation(setting, script).run()
    done.check()
    return done


def shapes(simulation: Simulation) -> list[list[tuple[int, int, int]]]:
    """Of each step its rows, as (rid, start, length)."""
    steps = []
    for batch, requests, _ in filter(None, simulation.consensus.plans):
        rids = [request.rid for request in requests]
        steps.append(list(zip(rids, batch.start.tolist(), batch.length.tolist(), strict=True)))
    return steps


@pytest.fixture
def nothing_reserved(monkeypatch):
    """Admission takes all that is free, so that memory runs out."""
    for name in ("RESERVE_START", "RESERVE_LEAST", "RESERVE_JUMP"):
        monkeypatch.setattr(srt.scheduler.planner, name, 0)


# ---- order and budget -----------------------------------------------------------------------------------------------


def test_decode_rows_come_first_and_prompts_get_a_share_of_the_budget():
    setting = Setting(token_budget=1024, num_pages=800, context_length=512, overlap=False)
    long, late = [*range(20)] * 10, [*range(30, 35)] * 8
    simulation = run(setting, {1: [request(1, [7], 20)], 2: [request(2, long, 4), request(3, late, 4)]})
    assert shapes(simulation)[:6] == [
        [(1, 0, 1)],
        [(1, 1, 1), (2, 0, 95)],
        [(1, 2, 1), (2, 95, 95)],
        [(1, 3, 1), (2, 190, 10), (3, 0, 40)],
        [(1, 4, 1), (2, 200, 1), (3, 40, 1)],
        [(1, 5, 1), (2, 201, 1), (3, 41, 1)],
    ]


@pytest.mark.parametrize(("decoding", "starting", "prompt_tokens"), [(8, 4, 400), (9, 4, 87), (2, 4, 400), (2, 3, 94)])
def test_a_crowd_of_prompts_gets_the_whole_budget(decoding, starting, prompt_tokens):
    setting = Setting(token_budget=1024, max_running=16, num_pages=800, context_length=512, overlap=False)
    script = {
        1: [request(rid, [rid], 20) for rid in range(decoding)],
        2: [request(20 + i, [20 + i] * 100, 4) for i in range(starting)],
    }
    second = run(setting, script).executor.batches[1]
    assert second.num_decode == decoding
    assert second.num_tokens - decoding == prompt_tokens


@pytest.mark.parametrize(("budget", "prompt_tokens"), [(16, 15), (64, 63), (256, 63), (2048, 100)])
def test_small_budgets_are_shared_less(budget, prompt_tokens):
    setting = Setting(token_budget=budget, num_pages=800, context_length=512, overlap=False)
    script = {1: [request(1, [1], 20)], 2: [request(2, [2] * 100, 4)]}
    second = run(setting, script).executor.batches[1]
    assert second.num_tokens - second.num_decode == prompt_tokens


def test_who_cannot_run_is_no_crowd():
    setting = Setting(token_budget=1024, max_running=3, num_pages=800, context_length=512, overlap=False)
    script = {
        1: [request(rid, [rid], 30) for rid in range(2)],
        2: [request(rid, [rid] * 200, 4) for rid in range(2, 9)],
    }
    second = run(setting, script).executor.batches[1]
    assert second.num_tokens - second.num_decode == 94


def test_budget_below_the_number_of_decode_rows_still_lets_a_prompt_through():
    setting = Setting(token_budget=2, max_running=4, num_pages=200)
    script = {1: [request(rid, [rid], 30) for rid in range(3)], 10: [request(3, list(range(5, 15)), 3)]}
    simulation = run(setting, script)
    for (batch, _, _), rows in zip(filter(None, simulation.consensus.plans), shapes(simulation), strict=True):
        prompt_tokens = batch.num_tokens - batch.num_decode
        assert batch.num_tokens <= 2 or prompt_tokens <= 1, rows
    assert any(batch.num_tokens == 4 for batch in simulation.executor.batches)


def test_prompt_tokens_of_a_step_stay_within_the_budget():
    setting = Setting(token_budget=7, max_running=8, num_pages=400)
    rnd = random.Random(1)
    script = {1: [request(rid, [rnd.randrange(VOCAB)] * rnd.randrange(1, 40), 4) for rid in range(20)]}
    assert max(batch.num_tokens for batch in run(setting, script).executor.batches) == 7


def test_no_more_rows_than_may_run():
    simulation = run(Setting(max_running=3, num_pages=400), {1: [request(rid, [rid], 9) for rid in range(10)]})
    assert max(simulation.observer.running) == 3


def test_fcfs_admits_in_order_of_arrival():
    simulation = run(Setting(max_running=1), {1: [request(rid, [rid] * (9 - rid), 3) for rid in range(6)]})
    assert list(simulation.outlet.finishes) == list(range(6))


def test_lpm_admits_the_longest_match_first_then_the_oldest():
    stem = list(range(20))
    script = {
        1: [request(0, stem, 4)],
        20: [
            request(1, [40, 41], 3),
            request(2, stem[:8] + [42], 3),
            request(3, stem[:16] + [43], 3),
            request(4, [44, 45], 3),
            request(5, stem[:16] + [46], 3),
        ],
    }
    fcfs = run(Setting(max_running=1, policy="fcfs"), script)
    lpm = run(Setting(max_running=1, policy="lpm"), script)
    assert list(fcfs.outlet.finishes) == [0, 1, 2, 3, 4, 5]
    assert list(lpm.outlet.finishes) == [0, 3, 5, 2, 1, 4]


# ---- the prefix cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "cached"), [(1, 15), (4, 12), (5, 15)])
@pytest.mark.parametrize("overlap", [True, False])
def test_second_turn_computes_only_its_new_tokens(page_size, cached, overlap):
    """The first turn is 16 tokens long; its last one was never fed back, so that 15 can be found."""
    setting = Setting(page_size=page_size, overlap=overlap)
    first = run(setting, {1: [request(1, list(range(10)), 6)]}).outlet.outputs[1]
    script = {1: [request(1, list(range(10)), 6)], 30: [request(2, list(range(10)) + first + [3, 4, 5], 6)]}
    simulation = run(setting, script)
    assert simulation.outlet.openings[1].cached_tokens == 0
    assert simulation.outlet.openings[2].cached_tokens == cached
    assert simulation.output.cached_tokens == cached
    assert simulation.output.prompt_tokens == 29
    assert [length for rows in shapes(simulation) for rid, _, length in rows if rid == 2][0] == 19 - cached


def test_siblings_share_chunks_before_the_first_is_done():
    stem = list(range(40))
    setting = Setting(token_budget=8, max_running=2, context_length=64, num_pages=200)
    simulation = run(setting, {1: [request(1, stem, 8)], 5: [request(2, stem, 8)]})
    assert simulation.outlet.openings[2].cached_tokens >= 16


def test_a_prompt_in_flight_is_shared_by_the_next_step():
    simulation = run(Setting(overlap=True), {1: [request(1, list(range(12)), 4)], 2: [request(2, list(range(12)), 4)]})
    assert simulation.outlet.openings[2].cached_tokens == 11


def test_identical_prompts_at_once_are_computed_once():
    """Each computes its last token, for its logits; the first the rest for all of them."""
    setting = Setting(max_running=4, token_budget=64, num_pages=64)
    simulation = run(setting, {1: [request(rid, list(range(12)), 4, seed=1) for rid in range(4)]})
    assert simulation.executor.batches[0].length.tolist() == [12, 1, 1, 1]
    assert [simulation.outlet.openings[rid].cached_tokens for rid in range(4)] == [0, 11, 11, 11]
    assert simulation.observer.held[:3] == [11 + 4, 11 + 8, 11 + 12]
    assert simulation.ledger.cached_tokens == 12 + 3


@pytest.mark.parametrize(("page_size", "shared"), [(1, 11), (4, 8), (16, 0)])
def test_a_step_shares_whole_pages_of_what_it_computes(page_size, shared):
    setting = Setting(page_size=page_size, token_budget=64, num_pages=64)
    stem = list(range(11))
    simulation = run(setting, {1: [request(1, [*stem, 20, 21], 4), request(2, [*stem, 30, 31, 32], 4)]})
    assert simulation.executor.batches[0].length.tolist() == [13, 14 - shared]


def test_a_prompt_takes_over_what_others_bring_while_it_is_computed():
    """The first answer becomes cached between two chunks of a prompt that contains it."""
    first = [7] * 4
    answer = run(Setting(), {1: [request(1, first, 12)]}).outlet.outputs[1]
    history = [*first, *answer[:11]]
    script = {1: [request(1, first, 12)], 11: [request(2, [*history, *range(20)], 3)]}
    simulation = run(Setting(token_budget=3, num_pages=200), script)
    starts = [start for rows in shapes(simulation) for rid, start, _ in rows if rid == 2]
    assert simulation.outlet.openings[2].cached_tokens == 3
    assert starts[:5] == [3, 5, 7, 9, len(history)]


def test_cache_off_finds_nothing():
    simulation = run(Setting(cache=False), {1: [request(1, [5] * 9, 4)], 20: [request(2, [5] * 9, 4)]})
    assert simulation.outlet.openings[2].cached_tokens == 0
    assert simulation.ledger.cached_tokens == 0


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("num_tokens", "context_length"), [(16, 40), (48, 24), (32, 33), (32, 34)])
@pytest.mark.parametrize("cache", [True, False])
def test_what_the_limits_allow_is_served_to_the_end(page_size, num_tokens, context_length, cache):
    """Every prompt with the most it may generate, or one less: alone in a used pool, and among two others."""
    rnd = random.Random(7)
    setting = Setting(
        page_size=page_size,
        num_pages=num_tokens // page_size,
        context_length=context_length,
        token_budget=11,
        max_running=3,
        cache=cache,
    )
    limits = setting.limits
    most = limits.max_total_tokens
    for prompt_len in range(1, most):
        max_new = max(1, most - prompt_len - prompt_len % 2)
        assert limits.refusal(prompt_len, max_new) is None
        assert limits.refusal(prompt_len, max_new + 2) is not None
        prompt = [rnd.randrange(VOCAB) for _ in range(prompt_len)]
        others = [request(rid, prompt[: rid + 1], min(rid, most - rid - 1)) for rid in (1, 2)]
        it = [request(rid, prompt, max_new) for rid in (3, 4)]
        outputs = run(setting, {1: [it[0]], 100: [others[0], it[1], others[1]]}).outlet.outputs
        assert len(outputs[3]) == len(outputs[4]) == max_new


def test_admission_leaves_the_pages_that_decode_rows_need_in_the_same_step():
    """Three rows enter a new page in the step in which a fourth request asks for one of the three that are left."""
    setting = Setting(page_size=16, num_pages=9, context_length=64, token_budget=128)
    simulation = run(setting, {1: [request(rid, [rid] * 30, 6) for rid in range(3)], 4: [request(3, [3] * 16, 1)]})
    assert simulation.planner.retractions == 0


def test_reserve_keeps_a_second_request_waiting_until_both_fit():
    setting = Setting(num_pages=32, max_running=2)
    simulation = run(setting, {1: [request(1, [1] * 4, 28), request(2, [2] * 4, 28)]})
    assert simulation.planner.retractions == 0
    assert max(simulation.observer.running) == 1


def test_reserve_does_not_believe_in_endless_outputs():
    """Two that may fill the pool, because nobody said how long they are to be, run together all the same."""
    setting = Setting(num_pages=10_000, context_length=9_000, max_running=2, eos_one_in=1)
    script = {1: [make_request(rid, [rid] * 4, 8_990, min_new_tokens=5) for rid in (1, 2)]}
    assert max(run(setting, script).observer.running) == 2


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_a_retracted_request_resumes_with_its_output(nothing_reserved, overlap, cache):
    setting = Setting(num_pages=32, max_running=2, overlap=overlap, cache=cache)
    simulation = run(setting, {1: [request(1, [1] * 4, 24)], 3: [request(2, [2] * 4, 24)]})
    retractions = {rid: finish.num_retractions for rid, finish in simulation.outlet.finishes.items()}
    assert retractions[1] == 0, "the one with more outputs stays"
    assert retractions[2] == simulation.planner.retractions > 0
    assert [len(simulation.outlet.outputs[rid]) for rid in (1, 2)] == [24, 24]
    reopened = [opened for batch in simulation.executor.batches for opened in batch.opened][2:]
    assert len(reopened) == retractions[2]
    for opened in reopened:
        assert opened.prompt_len == 4
        known = [2] * 4 + simulation.outlet.outputs[2]
        assert len(opened.tokens) > 4
        assert opened.tokens.tolist() == known[: len(opened.tokens)]
    assert simulation.outlet.openings[2].cached_tokens == 0, "what it finds of itself is no hit of its prompt"


def test_nothing_is_in_flight_when_a_request_is_retracted(nothing_reserved):
    setting = Setting(num_pages=32, max_running=2)
    simulation = Simulation(setting, {1: [request(1, [1] * 4, 24), request(2, [2] * 4, 24)]})
    retract = simulation.planner._retract

    def checked(victim):
        assert all(request.in_flight == 0 for request in simulation.planner.running)
        retract(victim)

    simulation.planner._retract = checked
    simulation.run().check()
    assert simulation.planner.retractions > 0


def test_nobody_is_admitted_in_the_step_of_a_retraction(nothing_reserved, monkeypatch):
    """Not even one that would be before the retracted in the queue and fit."""
    monkeypatch.setattr(srt.scheduler.planner, "PREEMPTED_MOST", 0)
    setting = Setting(num_pages=32, max_running=2, policy="priority", overlap=False)
    script = {1: [request(1, [1] * 8, 22), request(2, [2] * 4, 22)], 2: [request(3, [1] * 8 + [9], 1, priority=1)]}
    simulation = Simulation(setting, script)
    retractions = []
    simulation.observer.step = lambda unready: retractions.append(simulation.planner.retractions)
    simulation.run().check()
    at = retractions.index(1)
    plans = simulation.consensus.plans
    assert plans[at].batch.opened == ()
    assert [request.rid for request in plans[at + 1].requests] == [1, 3]


def test_a_prompt_retracted_half_way_does_not_count_its_own_chunks_as_cached(nothing_reserved):
    setting = Setting(num_pages=32, max_running=2, token_budget=2)
    script = {1: [request(1, [1] * 2, 24)], 12: [request(2, list(range(10, 28)), 4)]}
    simulation = run(setting, script)
    assert simulation.outlet.finishes[2].num_retractions > 0
    assert simulation.outlet.openings[2].cached_tokens == 0
    starts = [start for rows in shapes(simulation) for rid, start, _ in rows if rid == 2]
    assert starts.count(0) == 1, "it finds them"


def test_retraction_prefers_few_outputs_then_the_youngest(nothing_reserved):
    setting = Setting(num_pages=40, max_running=4, overlap=False)
    script = {1: [request(rid, [rid] * 3, 26) for rid in (1, 2, 3)], 8: [request(4, [4] * 3, 26)]}
    simulation = Simulation(setting, script)
    victims = []
    retract = simulation.planner._retract
    simulation.planner._retract = lambda victim: victims.append(victim) or retract(victim)
    simulation.run().check()
    assert [victim.rid for victim in victims[:3]] == [4, 3, 2]


# ---- shared prefixes ------------------------------------------------------------------------------------------------


def test_rows_that_share_a_prefix_are_neighbours():
    """Two families whose requests come in turn, and one request of no family; a group ends with its last but one."""
    left, right = [5] * 8, [6] * 6
    messages = [request(1, [*left, 10], 4), request(2, [*right, 11], 6), request(3, [12] * 7, 6)]
    messages += [request(4, [*left, 13], 6), request(5, [*right, 14], 6)]
    simulation = run(Setting(num_pages=200, max_running=8, token_budget=64), {1: messages})
    plans = [plan for plan in simulation.consensus.plans if plan and plan.batch.num_decode]
    rows = [([request.rid for request in requests], batch.shared) for batch, requests, _ in plans]
    assert rows[0] == ([1, 4, 2, 5, 3], ((2, 8), (2, 6)))
    assert rows[-1] == ([2, 5, 3, 4], ((2, 6),))


def test_few_tokens_in_common_make_no_group(monkeypatch):
    monkeypatch.setattr(srt.scheduler.planner, "SHARED_LEAST", 16)
    messages = [request(rid, [5] * 8 + [rid], 4) for rid in (1, 2, 3)]
    simulation = run(Setting(num_pages=200, max_running=8, token_budget=64), {1: messages[:2], 2: messages[2:]})
    assert [batch.shared for batch in simulation.executor.batches if batch.num_decode][:2] == [(), ((3, 8),)]
