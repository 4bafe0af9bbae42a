"""One rank goes wrong in one way: the group notices, names it and ends, and no client gets a wrong token or hangs."""

from __future__ import annotations

import pytest
from faulty_ranks import ENVIRONMENT
from rank_client import Client
from server_harness import running

ANSWER_SECONDS = 5.0  # from the last good token to the error
END_SECONDS = 10.0
FLAGS = (
    "--load-format",
    "dummy",
    "--context-length",
    "256",
    "--max-total-tokens",
    "500",
    "--max-running-requests",
    "6",
)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("token:1", ["scheduler 1", "disagree in step", "tokens"]),
        ("token:0", ["scheduler 0", "disagree in step", "tokens"]),
        ("order:1", ["scheduler 1", "disagree in step", "rows"]),
        ("eviction:1", ["scheduler 1", "disagree in step"]),
        ("inbox:1", ["scheduler 1", "hangs behind step"]),
        ("stop:1", ["scheduler 1", "is stopped"]),
        ("stop:0", ["scheduler 0", "is stopped"]),
        ("kill:1", ["scheduler 1", "was killed by SIGKILL"]),
        ("kill:0", ["scheduler 0", "was killed by SIGKILL"]),
        ("hang:1", ["scheduler 1", "hangs in step"]),
        ("hang:0", ["scheduler 0", "hangs in step"]),
        ("exception:1", ["scheduler 1 failed in step", "ZeroDivisionError: planted"]),
        ("exception:0", ["scheduler 0 failed in step", "ZeroDivisionError: planted"]),
    ],
)
def test_a_fault_is_found_named_and_answered(fault: str, words: list[str], small_model: str) -> None:
    with running(
        "--model-path",
        small_model,
        "--tp-size",
        "2",
        *FLAGS,
        module="faulty_ranks",
        env={**ENVIRONMENT, "FAULT": fault},
    ) as server:
        clients = [Client(server, seed) for seed in range(6)]
        for client in clients:
            client.join(30)
            assert not client.is_alive(), f"a client hangs: {server.log[-3000:]}"
            assert client.wrong is None
        assert server.wait(END_SECONDS) == 1
        server.assert_nothing_left()
        told = [client for client in clients if all(word in client.error for word in words)]
        assert told, [client.error for client in clients]
        for client in told:
            assert client.error_time - client.last_token < ANSWER_SECONDS
        assert all(word in server.log for word in words)
        assert "the last steps of every rank" in server.log
