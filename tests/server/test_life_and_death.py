"""How a server ends: told to, or because one of its processes dies. Clients hear of it, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
from server_harness import PATIENCE, Reply, Server, Stopwatch, running, wait_until

END_SECONDS = 5.0  # within which the death of one process takes all with it


@pytest.fixture
def flags(small_model: str) -> tuple[str, ...]:
    """Of a server that starts fast."""
    return ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1")


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
        assert self.text_came.wait(PATIENCE)

    def _listen(self) -> None:
        try:
            with self._server.stream("/generate", input_ids=[1, 2, 3], sampling_params=self._params) as stream:
                for event in stream:
                    self.events.append(event)
                    self.text_came.set()
                self.done = stream.done
        except Exception as error:
            self.error = error

    def wait(self) -> Any:
        """The last event; the stream must have been brought to its proper end."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the stream hangs"
        assert self.error is None, self.error
        assert self.done, "the stream was cut off"
        return self.events[-1]


def post_in_thread(server: Server) -> tuple[threading.Thread, list[Reply]]:
    """A long request that is not streamed; its reply appears in the list."""
    replies: list[Reply] = []
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: replies.append(server.post("/generate", body)))
    thread.start()
    return thread, replies


@pytest.mark.parametrize(
    ("title", "signum", "what"),
    [
        ("scheduler 0", signal.SIGKILL, "was killed by SIGKILL"),
        ("detokenizer", signal.SIGKILL, "was killed by SIGKILL"),
        ("detokenizer", signal.SIGSTOP, "is stopped"),
    ],
)
def test_a_child_that_fails_takes_all_with_it(title: str, signum: int, what: str, flags: tuple[str, ...]) -> None:
    with running(*flags) as server:
        streams = [Listener(server, 8000), Listener(server, 8000)]
        thread, replies = post_in_thread(server)
        wait_until(lambda: server.loads()["num_running_reqs"] == 3, PATIENCE, lambda: str(server.loads()))
        with Stopwatch() as watch:
            os.kill(server.pid_of(title), signum)
            for stream in streams:
                assert title in stream.wait()["error"]["message"]
            thread.join(PATIENCE)
            assert replies[0].status == 500
            assert title in replies[0].json["error"]["message"]
            assert server.wait() == 1
            server.assert_nothing_left()
            assert watch.seconds < END_SECONDS
        assert f"{title} " in server.log
        assert what in server.log


def test_children_end_when_the_main_process_is_killed(flags: tuple[str, ...]) -> None:
    with running(*flags) as server:
        stream = Listener(server, 8000)
        with Stopwatch() as watch:
            os.kill(server.pid_of("main"), signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
            server.assert_nothing_left(within=PATIENCE)
            assert watch.seconds < END_SECONDS
        stream._thread.join(PATIENCE)
        assert not stream._thread.is_alive()


def is_draining(server: Server) -> bool:
    try:
        return server.get("/ready").status == 503
    except ConnectionError:  # it has drained
        return True


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_running_requests_finish_and_new_ones_are_refused(signum: int, flags: tuple[str, ...]) -> None:
    with running(*flags) as server:
        stream = Listener(server, 600)
        # Ctrl-C reaches every process that the terminal has in its foreground, SIGTERM all that a service consists of.
        os.killpg(server.process.pid, signum)
        wait_until(lambda: is_draining(server), PATIENCE, lambda: server.log)
        with contextlib.suppress(ConnectionError):
            assert server.post("/generate", {"input_ids": [1]}).status == 503
        last = stream.wait()
        with Stopwatch() as watch:
            assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 600}
            assert server.wait() == 0
            server.assert_nothing_left()
            assert watch.seconds < END_SECONDS


@pytest.mark.parametrize("together", [False, True])
def test_a_second_signal_ends_at_once(together: bool, flags: tuple[str, ...]) -> None:
    with running(*flags) as server:
        stream = Listener(server, 8000)
        if together:  # both wait when the process runs again
            server.signal(signal.SIGSTOP)
            server.signal(signal.SIGINT)
        else:
            server.signal(signal.SIGTERM)
            wait_until(lambda: is_draining(server), PATIENCE, lambda: server.log)
            assert server.process.poll() is None, "the running request was not waited for"
        with Stopwatch() as watch:
            server.signal(signal.SIGTERM)
            server.signal(signal.SIGCONT)
            assert server.wait() == 0
            server.assert_nothing_left()
            assert watch.seconds < END_SECONDS
        assert stream.wait()["error"]["message"] == "The server was stopped before this request was done."


def test_a_signal_during_the_start_ends_it(flags: tuple[str, ...]) -> None:
    server = Server(*flags)
    try:
        wait_until(lambda: len(server.processes()) == 3, PATIENCE, lambda: server.log)
        with Stopwatch() as watch:
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            server.assert_nothing_left()
            assert watch.seconds < END_SECONDS
        assert "Traceback" not in server.log
    finally:
        server.dispose()
