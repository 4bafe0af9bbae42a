"""sglang-router, the real one from PyPI, in front of two servers: what it asks of a worker it gets.

It is installed once, into the user's cache; where that cannot be done the tests are skipped and say why.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import EventStream, Reply, Server, free_port, running, wait_until

from srt.model_files import cache_folder

pytestmark = pytest.mark.slow

WHEEL = "sglang-router==0.3.2"
POLICIES = ("cache_aware", "power_of_two", "round_robin")
START_SECONDS = 60.0
FLAGS = (
    "--load-format",
    "dummy",
    "--random-seed",
    "1",
    "--context-length",
    "1024",
    "--max-total-tokens",
    "4096",
    "--page-size",
    "16",
)


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder with the router and what it needs, for a Python of its own."""
    folder = cache_folder() / WHEEL.replace("==", "-")
    if not (folder / "sglang_router").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", scratch, WHEEL]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                pytest.skip(f"{WHEEL} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            Path(scratch).rename(folder)
            Path(scratch).mkdir()  # for the context to remove
    return folder


@pytest.fixture(scope="module")
def workers(small_model: str) -> Iterator[list[Server]]:
    """Two servers of a small model with random weights."""
    flags = ("--model-path", small_model, "--served-model-name", "small", *FLAGS)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running(*flags)) for _ in range(2)]


class Router:
    def __init__(self, folder: Path, workers: list[Server], policy: str) -> None:
        self.port = free_port()
        self.log_file = Path(tempfile.mkdtemp(prefix="ls-")) / "router.log"
        urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
        command = [
            sys.executable, "-m", "sglang_router", "launch", "--host", "127.0.0.1", "--port", str(self.port),
            "--policy", policy, "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
            "--worker-urls", *urls,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def is_ready(self) -> bool:
        """It has both workers."""
        assert self.process.poll() is None, self.log
        try:
            reply = self.get("/readiness")
        except OSError:
            return False
        return reply.status == 200 and reply.json["healthy_workers"] == 2

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.log_file.parent)

    def get(self, path: str) -> Reply:
        return self._request("GET", path)

    def ask(self, path: str, **body: Any) -> Any:
        reply = self._request("POST", path, body)
        assert reply.status == 200, reply.body
        return reply.json

    def chat(self, *messages: str) -> Any:
        roles = itertools.cycle(("user", "assistant"))
        said = [{"role": next(roles), "content": message} for message in messages]
        return self.ask("/v1/chat/completions", model="small", messages=said, max_tokens=4, ignore_eos=True)

    @contextlib.contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[EventStream]:
        connection = self._connect("POST", path, {**body, "stream": True})
        events = EventStream(connection, connection.getresponse())
        try:
            yield events
        finally:
            events.close()

    def _request(self, method: str, path: str, body: Any = None) -> Reply:
        connection = self._connect(method, path, body)
        with contextlib.closing(connection):
            response = connection.getresponse()
            return Reply(response.status, response.read())

    def _connect(self, method: str, path: str, body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection


@pytest.fixture(params=POLICIES)
def router(request: pytest.FixtureRequest, installed: Path, workers: list[Server]) -> Iterator[Router]:
    router = Router(installed, workers, request.param)
    router.policy = request.param
    try:
        wait_until(router.is_ready, START_SECONDS, lambda: router.log)
        yield router
    finally:
        router.stop()


def served(workers: list[Server]) -> list[int]:
    """Requests that have finished, by worker."""
    return [worker.info()["internal_states"][0]["finished_total"] for worker in workers]


def gauge(workers: list[Server], name: str) -> int:
    return sum(worker.info()["internal_states"][0][name] for worker in workers)


LONG = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}


def test_a_router_finds_all_that_it_wants_of_a_worker(router: Router, workers: list[Server]) -> None:
    log_before = router.log  # in which it may have asked before it had workers
    # Registered, with what it knows them by.
    known = {worker["url"]: worker for worker in router.get("/workers").json["workers"]}
    assert sorted(known) == sorted(f"http://127.0.0.1:{worker.port}" for worker in workers)
    for worker in known.values():
        assert worker["is_healthy"]
        assert worker["model_id"] == "small"
        labels = worker["metadata"]
        assert (labels["tp_size"], labels["dp_size"], labels["model_type"]) == ("1", "1", "llama")
        assert labels["disaggregation_mode"] == "null"
    assert router.get("/health").status == 200
    assert router.get("/get_model_info").json["served_model_name"] == "small"
    assert [model["id"] for model in router.get("/v1/models").json["data"]] == ["small"]

    # Served, in one piece and as streams.
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = router.ask("/generate", text="hello", sampling_params=params)
    with router.stream("/generate", text="hello", sampling_params=params) as events:
        assert [event["output_ids"] for event in events][-1] == whole["output_ids"]
        assert events.done
    completion = router.ask("/v1/completions", model="small", prompt="hello", max_tokens=6, temperature=0)
    assert completion["usage"]["completion_tokens"] <= 6
    assert router.chat("hello")["usage"]["completion_tokens"] == 4
    messages = [{"role": "user", "content": "hello"}]
    with router.stream(
        "/v1/chat/completions", model="small", messages=messages, max_tokens=6, stream_options={"include_usage": True}
    ) as events:
        assert list(events)[-1]["usage"]["completion_tokens"] <= 6
        assert events.done

    # A bad request keeps its status and its sentence.
    reply = router._request("POST", "/generate", {"text": "hello", "sampling_params": {"temperature": -1}})
    assert reply.status == 400
    assert "temperature" in reply.json["error"]["message"]

    # Loads, while something runs; metrics; then the client leaves.
    aborted = gauge(workers, "aborted_total")
    with router.stream("/generate", **LONG) as events:
        next(iter(events))
        loads = [worker["load"] for worker in router.get("/get_loads").json["workers"]]
        assert sorted(loads)[0] == 0 < sorted(loads)[1]
        metrics = router.get("/engine_metrics").body.decode()
        assert metrics.count("sglang_num_running_reqs{") == 2
    wait_until(lambda: gauge(workers, "aborted_total") == aborted + 1, 20, lambda: router.log)
    for worker in workers:
        worker.wait_idle(20)

    assert "No loads fetched" not in router.log[len(log_before) :]

    # Everything is forgotten everywhere.
    assert gauge(workers, "pool_cached") > 0
    assert router.ask("/flush_cache")["workers_flushed"] == 2
    assert gauge(workers, "pool_cached") == 0


def test_a_policy_shares_out_as_it_should(router: Router, workers: list[Server]) -> None:
    before = served(workers)
    stories = [f"Story number {number}. " + "It was a dark and stormy night. " * 12 for number in range(6)]
    for story in stories:
        router.chat(story)
    cached = [
        router.chat(story, "Indeed.", "Go on.")["usage"]["prompt_tokens_details"]["cached_tokens"] for story in stories
    ]
    shares = [now - then for now, then in zip(served(workers), before, strict=True)]
    assert sum(shares) == 12
    if router.policy == "cache_aware":
        assert min(cached) > 0, "a chat goes where it was"
    elif router.policy == "round_robin":
        assert shares == [6, 6]


def test_a_worker_that_ends_is_passed_over(installed: Path, workers: list[Server], small_model: str) -> None:
    """It answers 503 to what is new while it drains, and the router asks the other one."""
    flags = ("--model-path", small_model, "--served-model-name", "small", *FLAGS)
    with running(*flags) as ending:
        router = Router(installed, [workers[0], ending], "round_robin")
        try:
            wait_until(router.is_ready, START_SECONDS, lambda: router.log)
            with router.stream("/generate", **LONG) as first, router.stream("/generate", **LONG) as second:
                next(iter(first)), next(iter(second))
                ending.signal(signal.SIGTERM)
                for _ in range(6):
                    router.chat("hello")
        finally:
            router.stop()
