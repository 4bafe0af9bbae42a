"""sglang-router, the real one from PyPI, before two frontends: what it asks of a worker it gets.

It is installed once, into the user's cache; where that cannot be done the test is skipped and says why.
"""

import contextlib
import http.client
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from frontend_harness import MODEL, Server

from srt.model_files import cache_folder

WHEEL = "sglang-router==0.3.2"
START_SECONDS = 60.0
# What its own program does, without the packages that it wants for other things.
PROGRAM = """
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(**json.loads(sys.argv[1]))).start()
"""


@pytest.fixture(scope="module")
def installed():
    """A folder with the router alone."""
    folder = cache_folder() / f"{WHEEL.replace('==', '-')}-alone"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                f"{scratch}/it",
                WHEEL,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                pytest.skip(f"{WHEEL} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            Path(scratch, "it").rename(folder)
    return folder


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Server(tmp_path_factory.mktemp("s"))) for _ in range(2)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Router:
    def __init__(self, folder, workers, log):
        self.port = free_port()
        settings = {
            "worker_urls": [f"http://127.0.0.1:{worker.port}" for worker in workers], "host": "127.0.0.1",
            "port": self.port, "policy": "round_robin", "prometheus_port": free_port(),
            "worker_startup_check_interval": 1, "worker_startup_timeout_secs": int(START_SECONDS),
        }  # fmt: skip
        command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(folder)}, stdout=log, stderr=subprocess.STDOUT
        )

    def is_ready(self):
        """It has both workers."""
        assert self.process.poll() is None
        try:
            status, answer = self.ask("GET", "/readiness")
        except OSError:
            return False
        return status == 200 and answer["healthy_workers"] == 2

    def open(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def ask(self, method, path, body=None):
        connection, response = self.open(method, path, body)
        with contextlib.closing(connection):
            raw = response.read()
        return response.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()

    def ok(self, path, body=None):
        status, answer = self.ask("GET" if body is None else "POST", path, body)
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def router(installed, workers, tmp_path_factory):
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as file:
        router = Router(installed, workers, file)
    deadline = time.monotonic() + START_SECONDS
    try:
        while not router.is_ready():
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        yield router
    finally:
        router.process.kill()
        router.process.wait()


def test_a_router_finds_all_that_it_wants_of_a_worker(router, workers):
    known = {worker["url"]: worker for worker in router.ok("/workers")["workers"]}
    assert sorted(known) == sorted(f"http://127.0.0.1:{worker.port}" for worker in workers)
    assert all(worker["is_healthy"] and worker["model_id"] == MODEL for worker in known.values())
    assert all(worker["metadata"]["disaggregation_mode"] == "null" for worker in known.values())
    assert router.ok("/get_model_info")["served_model_name"] == MODEL
    assert [model["id"] for model in router.ok("/v1/models")["data"]] == [MODEL]

    params = {"max_new_tokens": 4, "temperature": 0}
    assert router.ok("/generate", {"text": "abcdef", "sampling_params": params})["text"] == "abcd"
    assert (
        router.ok("/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 2})["choices"][0]["text"] == "ab"
    )
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert router.ok("/v1/chat/completions", chat)["usage"]["completion_tokens"] == 4
    connection, response = router.open("POST", "/v1/chat/completions", {**chat, "stream": True})
    with contextlib.closing(connection):
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert [len(worker.engine.received) for worker in workers] == [2, 2]

    status, answer = router.ask("POST", "/generate", {"text": "a", "sampling_params": {"temperature": -1}})
    assert (status, "temperature" in answer["error"]["message"]) == (400, True)


def test_a_client_that_leaves_a_router_leaves_its_worker(router, workers):
    for worker in workers:
        worker.engine.hold_at = 1
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 900}, "stream": True}
    connection, response = router.open("POST", "/generate", body)
    response.readline()
    assert sorted(worker["load"] for worker in router.ok("/get_loads")["workers"]) == [0, 1]
    assert router.ok("/engine_metrics").count("sglang_num_running_reqs{") == 2
    response.close()
    connection.close()
    for worker in workers:
        worker.engine.step_s, worker.engine.hold_at = 0.1, math.inf  # a router notices when it has more to write
    workers[0].wait_for(lambda: sum(len(worker.engine.aborted) for worker in workers) == 1)
    assert router.ok("/flush_cache", {})["workers_flushed"] == 2
