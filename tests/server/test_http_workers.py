"""Several HTTP workers at one port: many streams at once, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket

import pytest
from faulty_ranks import ENVIRONMENT, expected
from server_harness import PATIENCE, Stopwatch, refused_start, running, wait_until
from test_life_and_death import END_SECONDS, Listener, is_draining

WORKERS = ("--http-workers", "2")
STREAMS, TOKENS = 1000, 32


async def streamed(port: int, number: int, begun: asyncio.Barrier) -> list[int]:
    """The ids that a stream gave, which is not over before all have begun."""
    body = {"input_ids": [2 + number % 150, 2 + number // 150], "stream": True}
    body["sampling_params"] = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": number}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
    data = await reader.readuntil(b"\n\n")
    assert data.startswith(b"HTTP/1.1 200"), data
    await begun.wait()
    data += await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    events = [part.split(b"\n\n", 1)[0] for part in data.split(b"data: ")[1:]]
    return json.loads(events[-2])["output_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_thousand_streams_at_once(workers: int, small_model: str) -> None:
    """All finish, and each gives what follows from its own prompt and seed."""

    async def all_at_once(port: int) -> list[list[int]]:
        begun = asyncio.Barrier(STREAMS)
        return await asyncio.gather(*(streamed(port, number, begun) for number in range(STREAMS)))

    flags = ("--model-path", small_model, "--load-format", "dummy", "--context-length", "64")
    flags += ("--max-running-requests", str(STREAMS), "--http-workers", str(workers))
    with running(*flags, module="faulty_ranks", env=ENVIRONMENT) as server:
        outputs = asyncio.run(all_at_once(server.port))
        for number, output in enumerate(outputs):
            prompt = [2 + number % 150, 2 + number // 150]
            assert output == expected(prompt, number, TOKENS), f"stream {number}"
        page = server.get("/metrics").body.decode()
        assert f'lockstep:requests_total{{model_name="{os.path.basename(small_model)}"}} {STREAMS}\n' in page
        server.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "signum", "what"),
    [
        ("http worker 2", signal.SIGKILL, "was killed by SIGKILL"),
        ("http worker 1", signal.SIGSTOP, "is stopped"),
        ("scheduler 0", signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_a_child_that_fails_takes_all_with_it(title: str, signum: int, what: str, small_model: str) -> None:
    with running("--model-path", small_model, "--load-format", "dummy", *WORKERS) as server:
        streams = [Listener(server, 8000) for _ in range(8)]
        with Stopwatch() as watch:
            os.kill(server.pid_of(title), signum)
            assert server.wait() == 1
            server.assert_nothing_left()
            assert watch.seconds < END_SECONDS + 5
        told = 0
        for stream in streams:
            stream._thread.join(PATIENCE)
            told += stream.done and title in stream.events[-1]["error"]["message"]
        assert told == 8 or title.startswith("http worker")  # whose own clients are cut off
        assert f"{title} " in server.log
        assert what in server.log


@pytest.mark.slow
def test_workers_end_with_the_main_process(small_model: str) -> None:
    with running("--model-path", small_model, "--load-format", "dummy", *WORKERS) as server:
        streams = [Listener(server, 8000) for _ in range(4)]
        os.kill(server.pid_of("main"), signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.assert_nothing_left(within=PATIENCE)
        assert all("the main process has died" in stream.wait()["error"]["message"] for stream in streams)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(small_model: str) -> None:
    with running("--model-path", small_model, "--load-format", "dummy", *WORKERS) as server:
        streams = [Listener(server, 8000) for _ in range(4)]
        server.signal(signal.SIGTERM)
        wait_until(lambda: is_draining(server), PATIENCE, lambda: server.log)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert all("was stopped before" in stream.wait()["error"]["message"] for stream in streams)


@pytest.mark.slow
def test_running_requests_finish_and_new_ones_are_refused(small_model: str) -> None:
    with running("--model-path", small_model, "--load-format", "dummy", *WORKERS) as server:
        streams = [Listener(server, 600) for _ in range(6)]
        os.killpg(server.process.pid, signal.SIGTERM)
        wait_until(lambda: is_draining(server), PATIENCE, lambda: server.log)
        with contextlib.suppress(ConnectionError):
            assert server.post("/generate", {"input_ids": [1]}).status == 503
        for stream in streams:
            assert stream.wait()["meta_info"]["finish_reason"] == {"type": "length", "length": 600}
        assert server.wait() == 0
        server.assert_nothing_left()
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_second_server_at_the_port_is_refused(small_model: str) -> None:
    with running("--model-path", small_model, "--load-format", "dummy", *WORKERS) as server:
        assert f"port {server.port} in use" in refused_start(*WORKERS, port=server.port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} in use" in refused_start(*WORKERS, port=port)


@pytest.mark.slow
def test_engines_take_turns(small_model: str) -> None:
    flags = ("--model-path", small_model, "--load-format", "dummy", "--context-length", "256", "--dp-size", "2")
    flags += ("--load-balance-method", "round_robin", *WORKERS)
    with running(*flags, module="faulty_ranks", env=ENVIRONMENT) as server:
        used = [0, 0]
        for number in range(40):
            answer = server.generate([5, 6, 7], 2, temperature=1.0, sampling_seed=number)
            assert answer["output_ids"] == expected([5, 6, 7], number, 2)
            used[answer["meta_info"]["dp_rank"]] += 1
        assert min(used) >= 18
    assert "--load-balance-method round_robin" in refused_start("--dp-size", "2", *WORKERS)
