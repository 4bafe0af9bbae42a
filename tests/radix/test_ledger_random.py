"""Random operations on the ledger and on the brute-force model, compared after each one."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ledger_harness import Harness

CONTEXT = 64


def drive(harness: Harness, rng: random.Random, operations: int) -> None:
    context = harness.context_length
    known = [tuple(rng.choices(range(2), k=context)) for _ in range(3)]
    for _ in range(operations):
        choice = rng.random()
        if choice < 0.3 or not harness.requests:
            head = rng.choice(known)[: rng.randrange(context)]
            tokens = (head + tuple(rng.choices(range(3), k=context)))[: rng.randint(1, context)]
            known[rng.randrange(3)] = (tokens + known[0])[:context]
            namespace = rng.choice([b"", b"", b"a"])
            request = harness.open(namespace, tokens, rng.randint(1, len(tokens)), rng.choice([0, 0, 0, 7]))
            if request is not None:
                harness.compute(request, rng.choice([0, context, rng.randrange(context)]))
            continue
        request = rng.choice(harness.requests)
        if choice < 0.45:
            growing = rng.sample(harness.requests, rng.randint(1, len(harness.requests)))
            lengths = [min(context, r.tenancy.allocated + rng.choice([0, 1, 1, 1, 5])) for r in growing]
            harness.grow(growing, lengths, together=rng.random() < 0.5)
        elif choice < 0.6:
            missing = context - len(request.tokens)
            request.tokens += tuple(rng.choices(range(2), k=min(missing, rng.choice([0, 1, 9]))))
            harness.compute(request, rng.randrange(context + 1))
        elif choice < 0.75:
            harness.share(request, rng.choice([request.computed, rng.randrange(context)]))
        elif choice < 0.78:
            harness.touch(b"", rng.choice(known)[: rng.randrange(context)])
        elif choice < 0.82:
            harness.adopt(request, rng.choice([context, rng.randrange(context)]))
        elif choice < 0.995:
            harness.close(request, rng.choice([None, context, context, rng.randrange(context)]))
        else:
            harness.flush()
    harness.flush()
    assert harness.ledger.free_tokens == harness.ledger.capacity


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (1, 110), (4, 12), (4, 40), (16, 5), (16, 12)])
def test_random_operations(page_size: int, num_pages: int, seed: int) -> None:
    harness = Harness(num_pages, page_size, num_rows=4, context_length=CONTEXT)
    drive(harness, random.Random(f"{page_size} {num_pages} {seed}"), 500)
    assert harness.evicted > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("page_size", "num_pages", "host_pages", "restore_least"),
    [(1, 70, 150, 1), (1, 70, 80, 5), (1, 90, 20, 3), (1, 90, 10, 1), (4, 20, 40, 1), (4, 20, 40, 5), (16, 6, 24, 1)],
)
def test_random_operations_with_host_memory(
    page_size: int, num_pages: int, host_pages: int, restore_least: int, seed: int
) -> None:
    harness = Harness(
        num_pages, page_size, 4, context_length=CONTEXT, host_pages=host_pages, restore_least=restore_least
    )
    drive(harness, random.Random(f"{page_size} {num_pages} {host_pages} {seed}"), 500)
    assert harness.evicted > 0
    assert harness.restored > 0


def test_random_operations_without_cache() -> None:
    harness = Harness(12, 4, num_rows=4, context_length=CONTEXT, cache_enabled=False)
    drive(harness, random.Random(1), 200)
    assert harness.evicted == 0


class LedgerMachine(RuleBasedStateMachine):
    """Hypothesis looks for a short sequence of operations that breaks the agreement, and shrinks it."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 16),
        num_rows=st.integers(1, 4),
        host_pages=st.sampled_from([0, 8, 30]),
        restore_least=st.integers(1, 4),
    )
    def start(self, page_size: int, num_pages: int, num_rows: int, host_pages: int, restore_least: int) -> None:
        self.harness = Harness(num_pages, page_size, num_rows, 20, host_pages=host_pages, restore_least=restore_least)

    def pick(self, data: st.DataObject):
        return data.draw(st.sampled_from(self.harness.requests))

    @rule(
        namespace=st.sampled_from([b"", b"n"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple),
        slots=st.integers(1, 20),
        reserve=st.integers(0, 4),
        computed=st.integers(0, 20),
    )
    def open(self, namespace: bytes, tokens: tuple[int, ...], slots: int, reserve: int, computed: int) -> None:
        request = self.harness.open(namespace, tokens, min(slots, len(tokens)), reserve)
        if request is not None:
            self.harness.compute(request, computed)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4).map(tuple), together=st.booleans())
    def grow(self, data: st.DataObject, more: tuple[int, ...], together: bool) -> None:
        request = self.pick(data)
        request.tokens = (request.tokens + more)[:20]
        self.harness.grow([request], [len(request.tokens)], together)
        self.harness.compute(request, 20)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), end=st.integers(0, 20))
    def share(self, data: st.DataObject, end: int) -> None:
        self.harness.share(self.pick(data), end)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), end=st.integers(0, 20))
    def adopt(self, data: st.DataObject, end: int) -> None:
        self.harness.adopt(self.pick(data), end)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data(), end=st.none() | st.integers(0, 20))
    def close(self, data: st.DataObject, end: int | None) -> None:
        self.harness.close(self.pick(data), end)

    @rule(namespace=st.sampled_from([b"", b"n"]), tokens=st.lists(st.integers(0, 1), max_size=20).map(tuple))
    def touch(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        self.harness.touch(namespace, tokens)

    @rule()
    def step(self) -> None:
        self.harness.step()

    @rule()
    def flush(self) -> None:
        self.harness.flush()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

TRACE = """
import random, zlib
from ledger_harness import Harness
from test_ledger_random import drive
harness = Harness(12, 4, num_rows=4, context_length=64)
trace = []
check = harness.check
harness.check = lambda: (check(), trace.append((harness.ledger.table.tobytes(), harness.ledger.evicted_total)))
drive(harness, random.Random(5), 100)
print(len(trace), zlib.crc32(repr(trace).encode()))
"""


def test_same_in_every_interpreter() -> None:
    """The slot table after every operation does not depend on the hash seed."""
    outputs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run([sys.executable, "-c", TRACE], env=env, capture_output=True, text=True, check=True)
        outputs.append(result.stdout)
    assert outputs[0] == outputs[1]
    assert int(outputs[0].split()[0]) >= 100
