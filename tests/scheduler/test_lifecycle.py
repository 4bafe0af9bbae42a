"""The life of a request at its edges: overrun, aborts at every stage, flushes, and the leader's socket."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from shared.simulation import Setting, Simulation, reference, request

from srt.config import SCHEDULE_POLICIES
from srt.messages import AbortRequest, ContinueGeneration, ControlReply, Finish, FlushCache, PauseGeneration
from srt.scheduler.intake import FollowerIntake, LeaderIntake
from srt.scheduler.observer import BoardObserver
from srt.transport import Sender

encode = msgspec.msgpack.encode

both = pytest.mark.parametrize("overlap", [True, False])


def rows_of(simulation: Simulation, rid: int) -> int:
    """How many launched rows computed something for this request."""
    plans = filter(None, simulation.consensus.plans)
    return sum(request.rid == rid for plan in plans for request in plan.requests)


# ---- the end of a request -------------------------------------------------------------------------------------------


@both
def test_a_stop_token_costs_one_overrun_row_whose_token_is_dropped(overlap):
    setting = Setting(overlap=overlap, eos_one_in=1)  # the first token that may end it does
    simulation = Simulation(setting, {1: [request(1, [5, 6], 20, min_new_tokens=3)]}).run()
    simulation.check()
    assert len(simulation.outlet.outputs[1]) == 4
    assert rows_of(simulation, 1) == 4 + overlap
    assert simulation.ledger.cached_tokens == 2 + 3, "the same prefix stays, whatever was computed"


@both
def test_a_length_is_known_before_and_costs_no_overrun_row(overlap):
    setting = Setting(overlap=overlap)
    simulation = Simulation(setting, {1: [request(1, [5, 6], 4, ignore_eos=True), request(2, [7], 1)]}).run()
    simulation.check()
    assert rows_of(simulation, 1) == 4
    assert rows_of(simulation, 2) == 1


def test_a_step_is_launched_before_the_last_ones_result_is_asked_for():
    script = {1: [request(1, [5, 6], 9, ignore_eos=True)]}
    assert Simulation(Setting(overlap=True), script).run().executor.most_unanswered == 2
    assert Simulation(Setting(overlap=False), script).run().executor.most_unanswered == 1


def test_grammars_see_each_token_before_the_next_is_masked():
    script = {1: [request(1, [5, 6], 20, ignore_eos=True, grammar="1000"), request(2, [5, 6], 20)]}
    simulation = Simulation(Setting(), script).run()
    simulation.check()
    assert simulation.grammars.dropped == {1}


def test_who_waits_for_a_grammar_is_shown_as_waiting():
    simulation = Simulation(Setting(), {1: [request(1, [5, 6, 7], 4, grammar="1000"), request(2, [5], 4)]})
    shown = []
    record = SimpleNamespace(gauges=lambda **values: shown.append((values["waiting"], values["waiting_tokens"])))
    simulation.scheduler._observer = BoardObserver(record, simulation.planner, simulation.output, simulation.ledger)
    simulation.run().check()
    assert shown[0] == (1, 3)
    assert shown[-1] == (0, 0)


def test_a_grammar_that_can_only_end_ends_its_request():
    simulation = Simulation(Setting(), {1: [request(1, [5, 6], 50, ignore_eos=True, grammar="9")]}).run()
    simulation.check()
    assert simulation.outlet.finishes[1] == Finish("stop")
    assert len(simulation.outlet.outputs[1]) < 50


def test_a_grammar_that_fails_takes_only_those_with_it_who_wanted_it():
    script = {
        1: [request(1, [5], 9), request(2, [6], 9, grammar="fails to compile"), request(3, [7], 9, grammar="1000")],
        2: [request(4, [8], 9, grammar="fails to compile"), request(5, [9], 30, grammar="fails when followed")],
    }
    simulation = Simulation(Setting(), script).run()
    simulation.check()
    finishes = simulation.outlet.finishes
    assert [finishes[rid].status for rid in (1, 2, 3, 4, 5)] == [0, 400, 0, 400, 400]
    assert finishes[2].message == finishes[4].message == "The grammar or schema cannot be enforced: fails to compile"


def test_a_request_that_waits_for_its_grammar_can_be_aborted():
    script = {1: [request(1, [5], 9, grammar="50"), request(2, [6], 9, grammar="50")], 2: [AbortRequest(1, "abort 1")]}
    simulation = Simulation(Setting(), script).run()
    simulation.check([1])
    assert simulation.outlet.outputs[1] == []
    assert len(simulation.outlet.outputs[2]) == 9


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_who_cannot_begin_in_time_is_told(policy):
    """The first request fills the pool for longer than others wait; a step takes 0.01 s."""
    setting = Setting(num_pages=40, max_running=2, policy=policy, waiting_timeout=0.1)
    script = {
        1: [request(1, [5] * 10, 25, ignore_eos=True)],
        2: [request(2, [7] * 20, 10), request(3, [8] * 20, 10)],
        60: [request(4, [7] * 20, 10)],
    }
    simulation = Simulation(setting, script).run()
    finishes = simulation.outlet.finishes
    for rid in (2, 3):
        assert (finishes[rid].reason, finishes[rid].status) == ("abort", 503)
        assert "0.1 s" in finishes[rid].message
        assert simulation.outlet.outputs[rid] == []
    for message in (simulation.requests[0], simulation.requests[3]):
        assert simulation.outlet.outputs[message.rid] == reference(message, setting).tokens
    simulation.check_nothing_left()
    assert not simulation.scheduler._arrivals


def test_who_has_begun_is_not_remembered():
    script = {1: [request(1, [5, 6], 20, ignore_eos=True)], 5: [request(rid, [rid], 3) for rid in range(2, 6)]}
    simulation = Simulation(Setting(waiting_timeout=1e6), script).run()
    simulation.check()
    assert not simulation.scheduler._arrivals


def test_who_gave_memory_back_has_begun():
    script = {1: [request(1, [5, 6], 20, ignore_eos=True)], 5: [PauseGeneration(1, True)], 40: [ContinueGeneration(2)]}
    simulation = Simulation(Setting(waiting_timeout=0.05), script).run()
    assert simulation.outlet.finishes[1].num_retractions == 1
    simulation.check()


# ---- aborts ---------------------------------------------------------------------------------------------------------


def aborted_at(step: int, setting: Setting, times: int = 1) -> Simulation:
    """Request 1 is aborted in the inbox of `step`; request 2 goes on."""
    script = {
        1: [request(1, list(range(20)), 20, ignore_eos=True), request(2, [7, 8], 30, ignore_eos=True)],
    }
    script.setdefault(step, []).extend([AbortRequest(1, "abort 1")] * times)
    simulation = Simulation(setting, script).run()
    simulation.check([1])
    assert simulation.outlet.outputs[2] == reference(simulation.requests[1], setting).tokens
    return simulation


@both
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("step", "num_output"),
    [pytest.param(1, 0, id="arriving"), pytest.param(3, 0, id="in its prompt"), pytest.param(12, 7, id="decoding")],
)
def test_an_abort_gives_back_within_a_step(overlap, times, step, num_output):
    setting = Setting(token_budget=4, num_pages=128, overlap=overlap)
    simulation = aborted_at(step, setting, times)
    assert simulation.outlet.finishes[1].reason == "abort"
    in_flight = overlap and num_output > 0
    assert len(simulation.outlet.outputs[1]) == num_output - in_flight
    # Only request 2 is left: its prompt and what it has generated since.
    assert simulation.observer.running[step - 1] == 1
    assert simulation.observer.held[step - 1] <= 2 + step


@both
def test_abort_of_one_that_waits(overlap):
    setting = Setting(max_running=1, overlap=overlap)
    script = {1: [request(1, [5], 20, ignore_eos=True), request(2, [6], 20)], 4: [AbortRequest(2, "abort 2")]}
    simulation = Simulation(setting, script).run()
    simulation.check([2])
    assert simulation.observer.waiting[2:4] == [1, 0]
    assert simulation.outlet.outputs[2] == []
    assert simulation.output.prompt_tokens == 1


@both
def test_abort_that_crosses_the_last_token(overlap):
    """With overlap the finished request is still in flight when the abort comes."""
    setting = Setting(overlap=overlap, eos_one_in=1)
    simulation = Simulation(setting, {1: [request(1, [5, 6], 20)]})
    simulation.outlet.on_delta = lambda delta: simulation.intake.later.append(AbortRequest(1, "late"))
    simulation.run().check()
    assert simulation.outlet.finishes[1].reason == "stop"


def test_abort_of_nobody():
    simulation = Simulation(Setting(), {1: [AbortRequest(5)], 2: [request(1, [5], 3), AbortRequest(2)]}).run()
    simulation.check()
    assert simulation.output.aborted == 0


# ---- flushes --------------------------------------------------------------------------------------------------------


def replies(setting: Setting, script) -> tuple[Simulation, list[tuple[int, bool]]]:
    simulation = Simulation(setting, script).run()
    simulation.check()
    return simulation, [(reply.ticket, reply.ok) for reply in simulation.outlet.replies]


def test_flush_when_idle_forgets_everything():
    script = {1: [request(1, [5] * 9, 3)], 20: [FlushCache(7)], 30: [request(2, [5] * 9, 3)]}
    simulation, answers = replies(Setting(), script)
    assert answers == [(7, True)]
    assert simulation.outlet.openings[2].cached_tokens == 0


@both
def test_flush_is_refused_at_once_while_busy(overlap):
    script = {1: [request(1, [5], 30, ignore_eos=True)], 5: [FlushCache(7)]}
    simulation, answers = replies(Setting(overlap=overlap), script)
    assert answers == [(7, False)]
    assert "1 request" in simulation.outlet.replies[0].message
    assert simulation.ledger.cached_tokens > 0


@both
def test_flush_waits_for_a_lull_until_its_deadline(overlap):
    script = {1: [request(1, [5], 30, ignore_eos=True)], 5: [FlushCache(7, 0.095), FlushCache(8, 1.0)]}
    simulation = Simulation(Setting(overlap=overlap), script)
    told_at = {}
    simulation.outlet.reply = lambda reply: told_at.setdefault(reply.ticket, (simulation.intake.number, reply.ok))
    simulation.run().check()
    assert told_at[7] == (15, False)  # the first inbox that is late enough
    assert told_at[8] == (30 + overlap, True)
    assert simulation.ledger.cached_tokens == 0


@both
@pytest.mark.parametrize("timeout_s", [0.0, 1.0])
def test_flush_just_after_the_answer_is_served(overlap, timeout_s):
    """Whoever has an answer may flush: the overrun row that is still in flight is not his business."""
    simulation = Simulation(Setting(overlap=overlap, eos_one_in=1), {1: [request(1, [5, 6], 20)]})
    simulation.outlet.on_delta = lambda delta: simulation.intake.later.append(FlushCache(7, timeout_s))
    simulation.run().check()
    assert simulation.outlet.replies == [ControlReply(7, True, "Cache flushed.")]
    assert simulation.ledger.cached_tokens == 0


def test_a_flush_behind_a_grammar_keeps_nobody_awake():
    script = {1: [request(1, [5, 6], 4, grammar="1000"), FlushCache(7, 0.03), FlushCache(8, 9.0)]}
    simulation, answers = replies(Setting(), script)
    assert answers == [(7, False), (8, True)]
    first_launch = next(step for step, plan in enumerate(simulation.consensus.plans) if plan)
    assert first_launch > 3
    assert all(simulation.intake.waits[:first_launch])


def test_several_flushes_are_each_answered_once():
    script = {1: [FlushCache(1), FlushCache(2, 1.0)], 2: [FlushCache(3)]}
    assert sorted(replies(Setting(), script)[1]) == [(1, True), (2, True), (3, True)]


# ---- the leader's socket --------------------------------------------------------------------------------------------


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def patient(monkeypatch):
    """A leader that waits for what was sent, however late it comes."""
    monkeypatch.setattr("srt.scheduler.intake.HEARTBEAT_MS", 60_000)


def test_leader_intake_reads_what_was_sent_in_order(endpoints, context, patient):
    intake = LeaderIntake(endpoints.leader, context)
    empty = intake.next(wait=False)
    assert (empty.number, empty.items) == (1, ())
    simulation = Simulation(Setting(), {})
    sender = Sender(endpoints.leader, context)
    messages = [request(1, [5, 6], 3), AbortRequest(9), request(2, [7], 4), FlushCache(3, 0.5)]
    sender.send([encode(message) for message in messages[:3]])
    sender.send([encode(messages[3])])
    received = []
    while len(received) < len(messages):
        before = time.monotonic()
        inbox = intake.next(wait=True)
        assert before <= inbox.now <= time.monotonic()
        assert inbox.items, "woken for nothing"
        received += map(simulation.scheduler._decoder.decode, inbox.items)
    assert received == messages


def test_an_idle_leader_sends_empty_inboxes(endpoints, context, monkeypatch):
    monkeypatch.setattr("srt.scheduler.intake.HEARTBEAT_MS", 20)
    intake = LeaderIntake(endpoints.leader, context)
    before = time.monotonic()
    assert [(inbox.number, inbox.items) for inbox in (intake.next(wait=True), intake.next(wait=True))] == [
        (1, ()),
        (2, ()),
    ]
    assert time.monotonic() - before > 0.03


class Pipe:
    """A broadcast to one follower in the same thread."""

    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(data)

    def receive(self):
        return self.sent.pop(0)


def test_followers_hear_what_the_leader_hears(endpoints, context, patient):
    pipe = Pipe()
    leader, follower = LeaderIntake(endpoints.leader, context, pipe), FollowerIntake(pipe)
    sender = Sender(endpoints.leader, context)  # which takes what it has not sent with it when it goes
    sender.send([encode(request(1, [5, 6], 3))])
    inboxes = [leader.next(wait=True), leader.next(wait=False)]
    assert len(inboxes[0].items) == 1
    assert [follower.next(wait=True), follower.next(wait=False)] == inboxes


def test_a_follower_notices_a_lost_inbox(endpoints, context):
    pipe = Pipe()
    leader, follower = LeaderIntake(endpoints.leader, context, pipe), FollowerIntake(pipe)
    leader.next(wait=False)
    leader.next(wait=False)
    pipe.receive()
    with pytest.raises(AssertionError, match="inbox 2 came where 1 was due"):
        follower.next(wait=False)


def test_scheduler_serves_from_a_leader_intake(endpoints, context):
    simulation = Simulation(Setting(), {})
    intake = LeaderIntake(endpoints.leader, context)
    simulation.scheduler._intake = intake
    simulation.outlet.on_delta = lambda delta: (
        setattr(simulation.scheduler, "stopped", True) if len(simulation.outlet.finishes) == 2 else None
    )
    simulation.requests = [request(1, [5, 6], 3), request(2, [7], 4)]
    sender = Sender(endpoints.leader, context)
    for message in simulation.requests:
        sender.send([encode(message)])
    simulation.run()
    for message in simulation.requests:
        assert simulation.outlet.outputs[message.rid] == reference(message, simulation.setting).tokens
