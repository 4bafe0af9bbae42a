"""What an administrator may ask of a running engine: pauses, profiles and new weights, beside all that goes on."""

from __future__ import annotations

import random

import pytest
from shared.simulation import Setting, Simulation, random_simulation, request

from srt.messages import (
    AbortRequest,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    PauseGeneration,
    StartProfile,
    StopProfile,
    UpdateWeights,
)

PROMPT = [5, 6, 7, 8]


class Recorder:
    """Notes what it is asked, and that nothing is under way then."""

    def __init__(self):
        self.asked, self.fault, self.simulation, self.steps = [], "", None, 0

    def step(self):
        self.steps += 1

    def start_profile(self, folder, num_steps):
        self.asked.append((folder, num_steps))
        return self.fault

    def stop_profile(self):
        self.asked.append("stop")
        return self.fault

    def update_weights(self, folder):
        planner, ledger = self.simulation.planner, self.simulation.ledger
        assert not planner.running
        assert ledger.free_tokens == ledger.capacity
        self.asked.append(folder)
        return self.fault


def run(script, setting=None, fault="", max_steps=0):
    recorder = Recorder()
    recorder.fault = fault
    simulation = Simulation(setting or Setting(), script, max_steps)
    recorder.simulation = simulation
    simulation.scheduler._control._maintenance = recorder
    simulation.run()
    return simulation, recorder.asked


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("retract", [True, False])
def test_nothing_is_computed_in_a_pause(overlap, retract):
    script = {
        1: [request(1, PROMPT, 20, ignore_eos=True)],
        8: [PauseGeneration(1, retract)],
        12: [request(2, PROMPT, 5)],
        30: [ContinueGeneration(2)],
    }
    simulation, _ = run(script, Setting(overlap=overlap))
    simulation.check()
    assert simulation.outlet.replies == [ControlReply(1, True, ""), ControlReply(2, True, "")]
    assert simulation.outlet.finishes[1].num_retractions == retract
    assert None in simulation.consensus.plans
    assert any(simulation.intake.waits[8:]), "it slept"


def test_the_paused_may_be_aborted():
    script = {
        1: [request(1, PROMPT, 50, ignore_eos=True), request(2, PROMPT, 50, ignore_eos=True)],
        8: [PauseGeneration(1, False)],
        9: [AbortRequest(1, "abort 1")],
        10: [ContinueGeneration(2)],
    }
    simulation, _ = run(script)
    simulation.check(aborted=[1])


def test_a_cache_is_flushed_while_all_are_retracted():
    script = {
        1: [request(1, PROMPT, 20, ignore_eos=True)],
        7: [FlushCache(1)],
        8: [PauseGeneration(2, True)],
        9: [FlushCache(3)],
        10: [ContinueGeneration(4)],
    }
    simulation, _ = run(script)
    simulation.check()
    assert {reply.ticket: reply.ok for reply in simulation.outlet.replies} == {1: False, 2: True, 3: True, 4: True}


@pytest.mark.parametrize("fault", ["", "the disk is gone"])
def test_weights_change_with_all_retracted_and_nothing_cached(fault):
    script = {
        1: [request(1, PROMPT, 20, ignore_eos=True)],
        4: [UpdateWeights(1, "/too/soon")],
        8: [PauseGeneration(2, True)],
        9: [UpdateWeights(3, "/new")],
        10: [ContinueGeneration(4)],
    }
    simulation, asked = run(script, fault=fault)
    simulation.check()
    assert asked == ["/new"]
    replies = {reply.ticket: reply for reply in simulation.outlet.replies}
    assert (replies[1].ok, replies[2].ok, replies[4].ok) == (False, True, True)
    assert (replies[3].ok, replies[3].message) == (not fault, fault)


def test_who_forgets_to_pause_hears_of_it_at_once():
    script = {1: [request(1, PROMPT, 40, ignore_eos=True)], 5: [UpdateWeights(1, "/new")]}
    simulation = Simulation(Setting(), script)
    left = simulation.outlet.outputs
    said = []
    simulation.outlet.reply = lambda message: said.append((message.ok, len(left[1])))
    simulation.run()
    assert len(said) == 1
    assert said[0][0] is False
    assert said[0][1] < 10


def test_all_at_once_is_done_in_order():
    items = [PauseGeneration(1, True), UpdateWeights(2, "/new"), ContinueGeneration(3), StartProfile(4, "/t", 5)]
    simulation, asked = run({1: [request(1, PROMPT, 20, ignore_eos=True)], 8: items})
    simulation.check()
    assert asked == ["/new", ("/t", 5)]
    assert [reply.ticket for reply in simulation.outlet.replies] == [1, 2, 3, 4]


def test_only_steps_that_compute_count_for_a_profile():
    script = {1: [request(1, PROMPT, 5, ignore_eos=True)], 3: [PauseGeneration(1)], 30: [ContinueGeneration(2)]}
    simulation = Simulation(Setting(), script)
    recorder = simulation.scheduler._control._maintenance = Recorder()
    simulation.run()
    assert recorder.steps == len(simulation.executor.batches) < len(simulation.consensus.plans)


def test_profiles_do_not_wait_for_a_lull():
    script = {1: [request(1, PROMPT, 40, ignore_eos=True)], 5: [StartProfile(1, "/t", 5)], 9: [StopProfile(2)]}
    simulation, asked = run(script)
    assert asked == [("/t", 5), "stop"]
    assert [reply.ticket for reply in simulation.outlet.replies] == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_pauses_change_no_answer(seed):
    plain, aborted = random_simulation(seed)
    rnd = random.Random(f"pauses {seed}")
    script = {step: list(items) for step, items in plain.script.items()}
    step = 0
    for ticket in range(1000, 1004):
        step += rnd.randrange(1, 12)
        script.setdefault(step, []).append(PauseGeneration(ticket, rnd.random() < 0.5))
        step += rnd.randrange(1, 5)
        script.setdefault(step, []).append(ContinueGeneration(2 * ticket))
    simulation, _ = run(script, plain.setting, max_steps=2 * plain.step_bound() + 100)
    simulation.check(aborted)
    assert len(simulation.outlet.replies) == 8 + sum(isinstance(i, FlushCache) for s in script.values() for i in s)
