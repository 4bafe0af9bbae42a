"""Who is admitted next: each order against one that looks at everybody every time, and the promises of the queue."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.simulation import Setting, Simulation, random_simulation
from shared.simulation import request as make_request

import srt.scheduler.planner
from radix import Ledger
from srt.config import SCHEDULE_POLICIES
from srt.messages import NewRequest, SamplingParams, pack_ids
from srt.scheduler.policy import OVERTAKINGS, WaitingQueue, make_queue
from srt.scheduler.request import Request

CONTEXT = 24


def waiting(serial: int, prompt: tuple[int, ...], namespace: bytes = b"", priority: int = 0) -> Request:
    message = NewRequest(serial, pack_ids(prompt), SamplingParams(4), namespace, priority)
    return Request.from_message(message, serial, ())


def make_ledger(num_pages: int = 400, page_size: int = 1) -> Ledger:
    return Ledger(num_pages=num_pages, page_size=page_size, num_rows=4, context_length=CONTEXT)


def cache(ledger: Ledger, request: Request) -> None:
    """Runs a prompt from its admission to its end."""
    key = request.key(request.length)
    ledger.close(ledger.open(request.namespace, key[:-4], request.length), key)


def admit_all(queue: WaitingQueue) -> list[int]:
    order = []
    while queue:
        request = queue.first()
        queue.admit(request)
        order.append(request.serial)
    return order


def matched(ledger: Ledger, request: Request) -> int:
    return ledger.peek(request.namespace, request.key(request.length - 1))


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 4).map(tuple)
families = st.lists(st.tuples(prompts, st.sampled_from([b"", b"n"])), min_size=1, max_size=14)


# ---- each order -----------------------------------------------------------------------------------------------------


@given(families, st.data())
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_longest_match_is_always_first_though_nobody_is_matched_every_time(drawn, data):
    """Requests come, leave and are cached between admissions: the first one is that of a search through all.

    Each prompt has an end of its own: one that is the head of another can match less of what both have in common, since
    its last token is computed anyway, and is asked in the other's stead.
    """
    ledger = make_ledger(page_size=data.draw(st.sampled_from([1, 2])))
    queue = make_queue("lpm", ledger)
    queue._overtakings = -(10**9)  # no turns
    serials = count(1)
    for prompt, namespace in drawn:
        serial = next(serials)
        queue.add(waiting(serial, (*prompt, 1000 + serial), namespace))
        if queue and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(list(queue)))
            queue.withdraw(gone)
        for _ in range(data.draw(st.integers(0, 2))):
            if queue:
                request = queue.first()
                assert request is min(queue, key=lambda r: (-matched(ledger, r), r.serial))
                queue.admit(request)
                cache(ledger, request)
    while queue:
        request = queue.first()
        assert request is min(queue, key=lambda r: (-matched(ledger, r), r.serial))
        queue.admit(request)
        cache(ledger, request)


def test_nothing_is_kept_of_those_that_leave_while_nobody_is_admitted():
    ledger = make_ledger()
    queue = make_queue("lpm", ledger)
    queue.add(waiting(0, (9,)))
    tracemalloc.start()
    for serial in range(1, 4001, 2):
        pair = [waiting(serial + i, (serial % 7, serial, i)) for i in range(2)]
        for request in pair:
            queue.add(request)
        for request in pair:
            queue.withdraw(request)
    del pair, request
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20_000
    assert admit_all(queue) == [0]


def test_a_match_that_was_evicted_counts_no_more():
    ledger = make_ledger()
    queue = make_queue("lpm", ledger)
    old, new = tuple(range(20)), tuple(range(100, 110))
    cache(ledger, waiting(1, old))
    queue.add(waiting(2, (*old, 1)))
    ledger.flush()
    cache(ledger, waiting(3, new))
    queue.add(waiting(4, (*new, 1)))
    assert admit_all(queue) == [4, 2]


def test_depth_first_finishes_a_family_before_the_next_and_begins_with_the_largest():
    queue = make_queue("dfs-weight", make_ledger())
    stem, other = (1, 1, 1, 1), (2, 2)
    family = {
        1: (9, 9, 9),
        2: other,
        3: (*other, 1),
        4: stem,
        5: (*stem, 1, 1),
        6: (*stem, 2, 1),
        7: (*other, 2),
        8: (*stem, 2, 2),
    }
    for serial, prompt in family.items():
        queue.add(waiting(serial, prompt))
    assert admit_all(queue) == [6, 8, 5, 4, 3, 7, 2, 1]


@given(families)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_depth_first_never_returns_to_a_prefix_it_has_left(drawn):
    """Wherever it cuts the prompts, those with the same head are admitted one after the other."""
    queue = make_queue("dfs-weight", make_ledger())
    requests = {serial: waiting(serial, *family) for serial, family in enumerate(drawn, start=1)}
    for request in requests.values():
        queue.add(request)
    queue._overtakings = -(10**9)
    order = [requests[serial] for serial in admit_all(queue)]
    for length in range(1, CONTEXT):
        heads = [(r.namespace, r.key(length)) if r.length >= length else r.serial for r in order]
        changes = sum(a != b for a, b in zip(heads, heads[1:], strict=False))
        assert changes == len(set(heads)) - 1


@pytest.mark.parametrize(("low_first", "expected"), [(False, [2, 4, 1, 3, 5]), (True, [3, 5, 1, 2, 4])])
def test_priority_then_arrival(low_first, expected):
    queue = make_queue("priority", make_ledger(), low_first)
    for serial, priority in enumerate((0, 7, -3, 7, -3), start=1):
        queue.add(waiting(serial, (serial,), priority=priority))
    assert admit_all(queue) == expected


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_other_policies_do_not_know_of_priority(policy):
    queue = make_queue(policy, make_ledger())
    for serial, priority in enumerate((0, 7, -3), start=1):
        queue.add(waiting(serial, (9,), priority=priority))
    assert admit_all(queue) == [1, 2, 3]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight"])
def test_who_was_retracted_comes_before_who_never_ran(policy):
    queue = make_queue(policy, make_ledger())
    for serial, retractions in ((3, 0), (4, 0), (2, 1), (1, 2)):
        request = waiting(serial, (5, 5, 5) if serial > 2 else (serial,))
        request.num_retractions = retractions
        queue.add(request)
    assert admit_all(queue) == [1, 2, 3, 4]


# ---- promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_nobody_is_overtaken_more_often_than_promised(policy):
    """A stream of requests that each order likes better than the few who wait from the beginning."""
    ledger = make_ledger(num_pages=4000)
    queue = make_queue(policy, ledger)
    liked, serials, rnd = tuple(range(50, 70)), count(1), random.Random(1)
    cache(ledger, waiting(0, liked))
    before: dict[int, int] = {}  # by serial, how many waited when it came
    overtaken: dict[int, int] = {}
    for step in range(3000):
        for _ in range(1 + (step < 30)):
            serial = next(serials)
            unloved = step < 12 or rnd.random() < 0.02
            request = waiting(serial, (serial % 40,) if unloved else (*liked, serial), priority=0 if unloved else 5)
            before[serial], overtaken[serial] = len(queue), 0
            queue.add(request)
        request = queue.first()
        queue.admit(request)
        for other in queue:
            overtaken[other.serial] += other.serial < request.serial
    for serial, times in overtaken.items():
        assert times <= OVERTAKINGS * (before[serial] + 1)
    if policy != "fcfs":
        assert max(overtaken.values()) > OVERTAKINGS, "else nothing was tried"


def test_no_request_is_looked_at_that_does_not_come_first():
    """However many wait, a question costs as much: unmatched ones are matched once, when they come."""
    ledger = make_ledger()
    looked = []
    peek, touch = ledger.peek, ledger.touch
    ledger.peek = lambda namespace, key: looked.append(key) or peek(namespace, key)
    ledger.touch = lambda namespace, key: looked.append(key) or touch(namespace, key)
    queue = make_queue("lpm", ledger)
    for serial in range(2000):
        queue.add(waiting(serial, (serial + 10, 1, 2)))
    assert len(looked) == 2000
    for _ in range(100):
        queue.admit(queue.first())
    assert len(looked) == 2000 + 100


def test_what_a_waiting_request_found_is_evicted_after_what_nobody_waits_for():
    ledger = make_ledger(num_pages=12)
    queue = make_queue("lpm", ledger)
    for serial, token in enumerate((1, 2, 3)):
        cache(ledger, waiting(serial, (token,) * 4))
    queue.add(waiting(4, (1,) * 5))
    ledger.close(ledger.open(b"", b"", 8), None)
    assert [ledger.peek(b"", pack_ids((token,) * 4)) for token in (1, 2, 3)] == [4, 0, 0]


# ---- in the loop ----------------------------------------------------------------------------------------------------


def ends(rid: int, prompt: list[int], max_new_tokens: int, priority: int = 0) -> NewRequest:
    return make_request(rid, prompt, max_new_tokens, priority=priority, ignore_eos=True)


def run(setting: Setting, script) -> Simulation:
    simulation = Simulation(setting, script).run()
    simulation.check()
    return simulation


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("short_of", ["rows", "memory"])
def test_an_urgent_request_takes_the_place_of_the_least_urgent(low_first, overlap, short_of):
    sign = -1 if low_first else 1
    rows, pages = (2, 200) if short_of == "rows" else (4, 40)
    setting = Setting(
        num_pages=pages,
        max_running=rows,
        policy="priority",
        low_priority_first=low_first,
        overlap=overlap,
    )
    script = {
        1: [ends(1, [1] * 4, 14, 0), ends(2, [2] * 4, 14, -sign)],
        4: [ends(3, [3] * 20, 4, 4 * sign), ends(4, [4] * 4, 4, -2 * sign)],
    }
    simulation = run(setting, script)
    retractions = {rid: finish.num_retractions for rid, finish in simulation.outlet.finishes.items()}
    assert retractions == {1: 0, 2: 1, 3: 0, 4: 0}
    assert list(simulation.outlet.finishes)[0] == 3


def test_equal_priorities_retract_nobody():
    script = {1: [ends(rid, [rid] * 4, 20, 3) for rid in range(6)]}
    simulation = run(Setting(num_pages=200, max_running=2, policy="priority"), script)
    assert simulation.planner.retractions == 0


def test_who_gave_way_often_enough_gives_way_no_more():
    """Short urgent requests come all the time; the patient one ends while they still do."""
    script = {1: [ends(0, [5] * 4, 40)]}
    script |= {step: [ends(step, [step % 40] * 3, 2, 1)] for step in range(3, 400, 3)}
    simulation = run(Setting(num_pages=64, max_running=1, policy="priority"), script)
    finish = simulation.outlet.finishes[0]
    assert finish.num_retractions == srt.scheduler.planner.PREEMPTED_MOST
    assert list(simulation.outlet.finishes).index(0) < len(script) - 20


@pytest.mark.parametrize("first", [3000, 3015])
def test_random_workloads_of_urgent_and_patient_requests_end(first, monkeypatch):
    """Tight pools without a reserve, where memory and urgency retract: every output is what it would be alone."""
    for name in ("RESERVE_START", "RESERVE_LEAST", "RESERVE_JUMP"):
        monkeypatch.setattr(srt.scheduler.planner, name, 0)
    retractions = 0
    for seed in range(first, first + 15):
        drawn, aborted = random_simulation(seed, tight=True)
        print(f"seed {seed}: {drawn.setting}")
        simulation = Simulation(dataclasses.replace(drawn.setting, policy="priority"), drawn.script)
        simulation.run().check(aborted)
        retractions += simulation.planner.retractions
    assert retractions > 5
