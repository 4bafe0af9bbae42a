"""Drafts change when tokens come and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shared.simulation import Setting, Simulation, random_simulation, request

from srt.scheduler.planner import DRAFT_MOST
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Draft


def answers(simulation: Simulation, aborted: list[int]) -> dict[int, tuple]:
    """What each request was told, token by token, but for those that may have been cut short."""
    outlet = simulation.outlet
    return {
        rid: (
            outlet.outputs[rid],
            (finish.reason, finish.matched),
            [delta.ids for delta in outlet.deltas[rid]],
            [delta.logprobs for delta in outlet.deltas[rid]],
        )
        for rid, finish in outlet.finishes.items()
        if rid not in aborted
    }


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_answers_are_those_without_drafts(seed):
    drawn, aborted = random_simulation(seed, tight=seed % 3 == 0)
    plain, *drafted = (
        Simulation(replace(drawn.setting, skill=skill, most_guessed=most), drawn.script)
        for skill, most in ((-1, 0), (100, 20), (70, 3), (0, 2))
    )
    expected = answers(plain.run(), aborted)
    for simulation in drafted:
        simulation.run().check(aborted)
        assert answers(simulation, aborted) == expected


@pytest.mark.parametrize("seed", [2001, 2005, 2013])
def test_a_draft_that_may_be_refused_follows_a_certain_one_in_flight(seed):
    """Little room cuts drafts down to what is certain, so that the next step computes what may be refused."""
    drawn, aborted = random_simulation(seed, tight=seed % 3 == 0)
    setting = replace(drawn.setting, skill=0, most_guessed=2, token_budget=3)
    Simulation(setting, drawn.script).run().check(aborted)


def plans(simulation: Simulation) -> list:
    return [plan for plan in simulation.run().consensus.plans if plan]


def drafting(skill: int, most: int, rids=(1,), **changes) -> Simulation:
    setting = Setting(token_budget=64, num_pages=256, skill=skill, most_guessed=most, **changes)
    script = {1: [request(rid, [5, 6, rid], 40, ignore_eos=True) for rid in rids]}
    return Simulation(setting, script)


def test_right_guesses_save_steps():
    """Four guesses and the token behind them, from the prompt on; the row is alone, so nothing else is computed."""
    simulation = drafting(100, 4)
    assert [len(plan.requests) for plan in plans(simulation)] == [1] * 8
    simulation.check()


def test_wrong_guesses_cost_no_answer_and_leave_no_slots():
    """Each step gives the one token that it would have given anyway, and what it held for guesses is taken back."""
    simulation = drafting(0, 4)
    assert [plan.batch.samples.tolist() for plan in plans(simulation)][:36] == [[5]] * 36
    simulation.check()
    assert max(simulation.observer.held) <= 3 + 40 + 4


def test_a_row_that_may_be_refused_sits_out_a_step_and_so_must_save_two():
    single = drafting(100, 1, rids=(1, 2, 3))
    assert not any(plan.drafts for plan in plans(single)[1:30] if len(plan.requests) == 3)
    double = drafting(100, 2, rids=(1, 4))  # nobody drafts for a fourth
    drafted = [[r.rid for r in plan.requests] for plan in plans(double)]
    assert drafted[:6] == [[1, 4], [4], [4, 1], [4], [4, 1], [4]]
    double.check()


def test_what_is_certain_is_not_sampled_and_nobody_sits_out():
    simulation = Simulation(
        Setting(token_budget=64, num_pages=256, skill=0, most_guessed=0),
        {1: [request(rid, [5, rid], 40, grammar="50", ignore_eos=True) for rid in range(1, 12)]},
    )
    laid = [(plan, index, draft) for plan in plans(simulation) for index, draft in plan.drafts.items()]
    assert laid
    for plan, index, draft in laid:
        assert len(draft.tokens) == draft.certain
        assert plan.batch.samples[index] == 1
    simulation.check()


def test_log_probabilities_are_told_of_certain_tokens_too():
    simulation = Simulation(
        Setting(token_budget=64, num_pages=256, skill=0, most_guessed=0),
        {1: [request(rid, [5, rid], 40, grammar="50", ignore_eos=True, logprobs=1) for rid in range(1, 12)]},
    )
    laid = [(plan, index, draft) for plan in plans(simulation) for index, draft in plan.drafts.items()]
    assert laid
    for plan, index, draft in laid:
        assert draft.certain == 0
        assert plan.batch.samples[index] == 1 + len(draft.tokens)
    simulation.check()


def test_no_draft_takes_the_memory_that_running_rows_need():
    """Four requests fill the pool to the last slot: they may draft as long as all could still take a step."""
    setting = Setting(num_pages=68, context_length=64, token_budget=64, skill=100, most_guessed=20)
    script = {1: [request(rid, [rid] * 9, 8, ignore_eos=True) for rid in (1, 2, 3, 5)]}
    simulation = Simulation(setting, script)
    assert any(plan.drafts for plan in plans(simulation))
    simulation.check()
    assert simulation.planner.retractions == 0


@pytest.mark.parametrize("max_running", [6, 30])
def test_a_step_samples_no_more_than_the_device_has_logits_for(max_running):
    """That is for all rows that may run and one draft. Rows that do not run leave theirs to others' drafts."""
    simulation = drafting(100, 20, rids=(1, 2, 3, 5, 6, 7), max_running=max_running, context_length=100)
    samples = [int(plan.batch.samples.sum()) for plan in plans(simulation)]
    simulation.check()
    assert max(samples) <= max_running + DRAFT_MOST
    assert (max(samples) > 6 + DRAFT_MOST) == (max_running == 30)


def test_who_comes_to_the_step_has_logits_too():
    """Six that draft as much as they may run when twenty come, for whom there is memory."""
    setting = Setting(token_budget=256, num_pages=2000, max_running=30, skill=100, most_guessed=20, overlap=False)
    script = {
        1: [request(rid, [5, rid], 40, ignore_eos=True) for rid in (1, 2, 3, 5, 6, 7)],
        2: [request(rid, [6, rid], 2, ignore_eos=True) for rid in range(20, 40)],
    }
    simulation = Simulation(setting, script)
    samples = [(int(plan.batch.samples.sum()), len(plan.requests)) for plan in plans(simulation)]
    simulation.check()
    assert max(samples)[0] <= 30 + DRAFT_MOST
    assert max(rows for _, rows in samples) == 26


def test_what_drafts_leave_of_the_budget_is_for_prompts():
    setting = Setting(token_budget=64, num_pages=600, context_length=256, skill=100, most_guessed=4, overlap=False)
    script = {1: [request(1, [5, 6], 40, ignore_eos=True)], 3: [request(2, [7] * 200, 2, ignore_eos=True)]}
    simulation = Simulation(setting, script)
    both = [plan for plan in plans(simulation) if len(plan.requests) == 2]
    assert both[0].drafts
    assert both[0].batch.num_tokens == 64
    simulation.check()


@pytest.mark.parametrize(("skill", "least", "most"), [(100, 1.0, 1.0), (70, 0.3, 0.95), (0, 0.0, 0.3)])
def test_it_is_counted_what_drafts_got_right(skill, least, most):
    simulation = drafting(skill, 6, rids=(1, 2, 3))
    drafts = [draft for plan in plans(simulation) for draft in plan.drafts.values()]
    laid = sum(len(draft.tokens) for draft in drafts)
    assert simulation.output.drafts == len(drafts)
    assert simulation.output.drafted_tokens == laid > 20
    assert least * laid <= simulation.output.accepted_draft_tokens <= most * laid


def test_a_draft_lies_behind_what_is_in_flight():
    message = request(1, [7, 8], 10)
    drafted = Request.from_message(message, 1, ())
    drafted.draft = Draft((1, 2, 3, 4), 2)
    assert drafted.draft_ahead(9, 9, 2) == ((1, 2, 3, 4), 2)
    drafted.length += 1
    assert drafted.draft_ahead(9, 9, 2) == ((2, 3, 4), 1)
    assert drafted.draft_ahead(2, 9, 2) == ((2,), 1)
    assert drafted.draft_ahead(0, 9, 2) == ((), 0)
    drafted.length += 1
    assert drafted.draft_ahead(9, 9, 2) == ((3, 4), 0)
    assert drafted.draft_ahead(9, 9, 3) == ((), 0)
    assert drafted.draft_ahead(9, 1, 1) == ((3,), 0)
    assert drafted.draft_ahead(9, 1, 2) == ((), 0)
    drafted.length = drafted.max_length - 2
    drafted.draft = Draft(tuple(range(20)), 20)
    assert drafted.draft_ahead(9, 9, 2) == ((8,), 1), "behind it one more token is sampled, and that is the last"
