"""How a server ends: told to, or because one of its processes dies. Clients hear of it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from server_harness import Reply, Server, running, wait_until

END_SECONDS = 5.0  # within which the death of one process takes all with it
FAST_START = ("--load-format", "dummy", "--random-seed", "1")


class Listener:
    """A client that reads a stream in a thread of its own until it ends."""

    def __init__(self, server: Server, max_new_tokens: int) -> None:
        self.events: list[Any] = []
        self.done = False
        self.error: Exception | None = None
        self.text_came = threading.Event()
        self._server = server
        self._params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        assert self.text_came.wait(30)

    def _listen(self) -> None:
        try:
            with self._server.stream("/generate", input_ids=[1, 2, 3], sampling_params=self._params) as stream:
                for event in stream:
                    self.events.append(event)
                    self.text_came.set()
                self.done = stream.done
        except Exception as error:
            self.error = error

    def wait(self, timeout: float) -> Any:
        """The last event; the stream must have been brought to its proper end."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream hangs"
        assert self.error is None, self.error
        assert self.done, "the stream was cut off"
        return self.events[-1]


def post_in_thread(server: Server) -> tuple[threading.Thread, list[Reply]]:
    """A long request that is not streamed; its reply appears in the list."""
    replies: list[Reply] = []
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: replies.append(server.post("/generate", body)))
    thread.start()
    return thread, replies


@pytest.mark.parametrize("title", ["scheduler 0", "detokenizer"])
def test_a_child_that_is_killed_takes_all_with_it(title: str) -> None:
    with running(*FAST_START) as server:
        streams = [Listener(server, 5000), Listener(server, 5000)]
        thread, replies = post_in_thread(server)
        wait_until(lambda: server.loads()["num_running_reqs"] == 3, 5, lambda: str(server.loads()))
        os.kill(server.pid_of(title), signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            assert title in stream.wait(END_SECONDS)["error"]["message"]
        thread.join(END_SECONDS)
        assert replies[0].status == 500
        assert title in replies[0].json["error"]["message"]
        assert server.wait(END_SECONDS) == 1
        server.assert_nothing_left()
        assert time.monotonic() - killed < END_SECONDS
        assert f"{title} " in server.log
        assert "was killed by SIGKILL" in server.log


def test_children_end_when_the_main_process_is_killed() -> None:
    with running(*FAST_START) as server:
        stream = Listener(server, 5000)
        os.kill(server.pid_of("main"), signal.SIGKILL)
        assert server.wait(1) == -signal.SIGKILL
        server.assert_nothing_left(within=END_SECONDS)
        stream._thread.join(1)
        assert not stream._thread.is_alive()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_and_new_ones_are_refused(signum: int) -> None:
    with running(*FAST_START) as server:
        stream = Listener(server, 60)
        # Ctrl-C reaches every process that the terminal has in its foreground, SIGTERM all that a service consists of.
        os.killpg(server.process.pid, signum)
        time.sleep(0.1)
        try:
            assert server.post("/generate", {"input_ids": [1]}).status == 503
            assert server.get("/ready").status == 503
        except ConnectionError:
            pass
        last = stream.wait(30)
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
        assert server.wait(END_SECONDS) == 0
        server.assert_nothing_left()


def test_a_second_signal_ends_at_once() -> None:
    with running(*FAST_START) as server:
        stream = Listener(server, 8000)
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None, "the running request was not waited for"
        server.signal(signal.SIGTERM)
        assert server.wait(END_SECONDS) == 0
        server.assert_nothing_left()
        assert "error" in stream.wait(1)


def test_a_signal_during_the_start_ends_it() -> None:
    server = Server(*FAST_START)
    try:
        wait_until(lambda: len(server.processes()) == 3, 30, lambda: server.log)
        server.signal(signal.SIGTERM)
        assert server.wait(END_SECONDS) == 0
        server.assert_nothing_left()
        assert "Traceback" not in server.log
    finally:
        server.dispose()
