"""One rank goes wrong in one way: the group notices, names it and ends, and no client gets a wrong token or hangs."""

from __future__ import annotations

import pytest
from faulty_ranks import ENVIRONMENT, SMALL
from rank_client import Client
from server_harness import PATIENCE, Server, Stopwatch, running

ANSWER_SECONDS = 5.0  # from the last good token to the error
FAULTS = {
    "token:0": ["scheduler 0", "disagree in step", "tokens"],
    "token:1": ["scheduler 1", "disagree in step", "tokens"],
    "order:1": ["scheduler 1", "disagree in step", "rows"],
    "eviction:1": ["scheduler 1", "disagree in step"],
    "inbox:1": ["scheduler 1", "hangs behind step"],
    "stop:0": ["scheduler 0", "is stopped"],
    "stop:1": ["scheduler 1", "is stopped"],
    "kill:0": ["scheduler 0", "was killed by SIGKILL"],
    "kill:1": ["scheduler 1", "was killed by SIGKILL"],
    "hang:0": ["scheduler 0", "hangs in step"],
    "hang:1": ["scheduler 1", "hangs in step"],
    "exception:0": ["scheduler 0 failed in step", "ZeroDivisionError: planted"],
    "exception:1": ["scheduler 1 failed in step", "ZeroDivisionError: planted"],
}
"""What goes wrong, in which rank, and words of the sentence that names it."""
QUICK = ("token:1",)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAULTS])
def test_a_fault_is_found_named_and_answered(fault: str, small_model: str) -> None:
    words = FAULTS[fault]
    flags = ("--model-path", small_model, "--tp-size", "2", *SMALL)
    env = {**ENVIRONMENT, "FAULT": fault}
    with Stopwatch() as watch, running(*flags, module="faulty_ranks", env=env) as server:
        clients = [Client(server, seed, watch) for seed in range(6)]
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive(), "a client hangs"
            assert client.wrong is None
        assert server.wait() == 1
        server.assert_nothing_left()
        told = [client for client in clients if all(word in client.error for word in words)]
        assert told, [client.error for client in clients]
        for client in told:
            assert client.error_time - client.last_token < ANSWER_SECONDS
        assert all(word in server.log for word in words)
        assert "the last steps of every rank" in server.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("token:1", ["scheduler 1 and scheduler 0 disagree in step", "tokens"]),
        ("rows:1", ["scheduler 1 and scheduler 0 disagree in step", "rows"]),
        ("stop:1", ["scheduler 1", "is stopped"]),
        ("kill:0", ["scheduler 0", "was killed by SIGKILL"]),
    ],
)
def test_a_fault_between_the_collectives_of_a_real_model(fault: str, words: list[str], small_model: str) -> None:
    """The other rank waits inside a collective, or dies of it."""
    flags = ("--model-path", small_model, "--tp-size", "2", *SMALL)
    env = {**ENVIRONMENT, "FAULT": fault, "DEVICE": "model"}
    with Stopwatch() as watch, running(*flags, module="faulty_ranks", env=env) as server:
        clients = [Client(server, seed, watch, checks=False) for seed in range(6)]
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive(), "a client hangs"
        assert server.wait() == 1
        server.assert_nothing_left()
        told = [client for client in clients if all(word in client.error for word in words)]
        assert told, [client.error for client in clients]
        assert all(client.error_time - client.last_token < ANSWER_SECONDS for client in told)


@pytest.mark.slow
def test_another_pool_is_found_at_the_first_step(small_model: str) -> None:
    flags = ("--model-path", small_model, "--tp-size", "2", *SMALL)
    server = Server(*flags, module="faulty_ranks", env={**ENVIRONMENT, "FAULT": "pool:1"})
    try:
        assert server.wait() == 1
        assert "scheduler 1 and scheduler 0 disagree in step 1, free: 12b and 12c" in server.log
        server.assert_nothing_left()
    finally:
        server.dispose()
