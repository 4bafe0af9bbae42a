"""One rank goes wrong in one way: the group notices, names it and ends, and no client gets a wrong token or hangs."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from faulty_ranks import VOCAB, expected
from server_harness import ROOT, Server, running

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
PYTHONPATH = ":".join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))


class Client(threading.Thread):
    """Asks one request after the other, and compares each token, until it is told that the server has a fault."""

    def __init__(self, server: Server, seed: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.answers = 0
        self.error = ""
        self.wrong: Any = None
        self.heard = time.monotonic()
        self._random = random.Random(seed)
        self.start()

    def run(self) -> None:
        while not self.error and self.wrong is None:
            try:
                self._ask()
            except (ConnectionError, OSError) as error:
                self.error = f"{type(error).__name__}: {error}"
            self.heard_error = time.monotonic()

    def _ask(self) -> None:
        rnd = self._random
        prompt = [rnd.randrange(VOCAB) for _ in range(rnd.randrange(5, 80))]
        count, seed = rnd.randrange(20, 120), rnd.randrange(2**32)
        right = expected(prompt, seed, count)
        params = {"max_new_tokens": count, "ignore_eos": True, "sampling_seed": seed, "temperature": 1}
        with self.server.stream("/generate", input_ids=prompt, sampling_params=params) as stream:
            if stream.status != 200:
                self.error = stream._response.read().decode()
                return
            for event in stream:
                if "error" in event:
                    self.error = event["error"]["message"]
                    return
                self.heard = time.monotonic()
                ids = event["output_ids"]
                if ids != right[: len(ids)]:
                    self.wrong = (ids, right)
                    return
            self.answers += 1


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
    env = {"FAULT": fault, "PYTHONPATH": PYTHONPATH}
    with running("--model-path", small_model, "--tp-size", "2", *FLAGS, module="faulty_ranks", env=env) as server:
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
            assert client.heard_error - client.heard < ANSWER_SECONDS
        assert all(word in server.log for word in words)
        assert "the last steps of every rank" in server.log
