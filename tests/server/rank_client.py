"""A client of `faulty_ranks` that compares each token with what the fake model must say."""

from __future__ import annotations

import random
import threading
from typing import Any

from faulty_ranks import VOCAB, expected
from server_harness import Server, Stopwatch


class Client(threading.Thread):
    """Asks one request after the other, until it hears an error or the event is set; leaves a share of its streams."""

    def __init__(
        self,
        server: Server,
        seed: int,
        watch: Stopwatch,
        until: threading.Event | None = None,
        leaves: float = 0.0,
        checks: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.error = ""
        self.wrong: Any = None  # tokens that came, and those that should have
        self.last_token = self.error_time = watch.seconds
        self._server = server
        self._watch = watch
        self._random = random.Random(seed)
        self._until = until or threading.Event()
        self._leaves = leaves
        self._checks = checks
        self.start()

    def run(self) -> None:
        while not self.error and self.wrong is None and not self._until.is_set():
            try:
                self._ask()
            except OSError as error:
                self.error = f"{type(error).__name__}: {error}"
        self.error_time = self._watch.seconds

    def _ask(self) -> None:
        rnd = self._random
        prompt = [rnd.randrange(3) for _ in range(rnd.randrange(4))]
        prompt += [rnd.randrange(VOCAB) for _ in range(rnd.randrange(5, 80))]
        count, seed = rnd.randrange(20, 120), rnd.randrange(2**32)
        leave_after = rnd.randrange(count) if rnd.random() < self._leaves else count
        right = expected(prompt, seed, count) if self._checks else None
        params = {"max_new_tokens": count, "ignore_eos": True, "sampling_seed": seed, "temperature": 1}
        with self._server.stream("/generate", input_ids=prompt, sampling_params=params) as stream:
            if stream.status != 200:
                self.error = stream.read().decode()
                return
            for event in stream:
                if "error" in event:
                    self.error = event["error"]["message"]
                    return
                self.last_token = self._watch.seconds
                ids = event["output_ids"]
                if right is not None and ids != right[: len(ids)]:
                    self.wrong = (ids, right)
                    return
                if len(ids) > leave_after:
                    return
            self.answers += 1
