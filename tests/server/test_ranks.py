"""Ranks that share a model answer as one rank does, and go on agreeing whatever clients do and clocks say."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from faulty_ranks import ENVIRONMENT, SMALL
from rank_client import Client
from server_harness import PATIENCE, Server, Stopwatch, running, wait_until

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old man who had never seen a",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils at",
    "Dear Sir or Madam,\n\nI am writing to you because",
]
TIGHT = ("--max-total-tokens", "160", "--chunked-prefill-size", "16", "--page-size", "4")


def ask(server: Server, count: int) -> list[list[int]]:
    """The output of all prompts at once: in one request, so that they need memory at the same time."""
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return [reply["output_ids"] for reply in server.ask("/generate", text=PROMPTS, sampling_params=params)]


def leaves(server: Server) -> bool:
    """A client does, and is noticed before its answer has come to its end."""
    with server.stream("/generate", text=PROMPTS[0], sampling_params={"max_new_tokens": 80}) as stream:
        next(iter(stream))
    server.wait_idle()
    return server.info()["internal_states"][0]["aborted_total"] > 0


def answers(server: Server) -> dict[str, Any]:
    """What a server says to requests of every kind."""
    found: dict[str, Any] = {"at once": ask(server, 40)}
    wait_until(lambda: leaves(server), PATIENCE, lambda: server.log)
    server.post("/flush_cache")
    again = [server.generate(prompt, 12) for prompt in PROMPTS[:2] * 2]
    found["again"] = [reply["output_ids"] for reply in again]
    found["cached"] = [reply["meta_info"]["cached_tokens"] for reply in again]
    stop = again[0]["text"][5:8]
    found["stopped"] = server.generate(PROMPTS[0], 12, stop=[stop])["text"]
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.stream("/generate", text=PROMPTS[2], sampling_params=params) as stream:
        found["streamed"] = [event["text"] for event in stream][-1]
    drawn = {"temperature": 1.0, "sampling_seed": 5, "top_p": 0.9}
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "maximum": 99}}}
    found["constrained"] = server.generate(PROMPTS[3], 20, **drawn, regex="[a-z]{3,}( [a-z]{3,})*")["output_ids"]
    found["json"] = server.generate(PROMPTS[3], 30, **drawn, json_schema=schema)["output_ids"]
    found["drawn"] = server.generate(PROMPTS[3], 12, **drawn)["output_ids"]
    return found


@pytest.mark.parametrize("size", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_ranks_of_a_small_model_answer_as_one(small_model: str, size: str) -> None:
    """In a pool so small that requests are set back."""
    flags = ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1", "--dtype", "float32", *TIGHT)
    found = []
    for tp_size in ("1", size):
        with running(*flags, "--tp-size", tp_size) as server:
            found.append(answers(server))
            gauges = server.info()["internal_states"][0]
            assert gauges["retractions_total"] > 0
    assert found[0]["cached"][-1] > 0
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "3"])
def test_ranks_restore_prefixes_from_host_memory(small_model: str, size: str) -> None:
    """In a pool for one prompt, so that each evicts the one before; what comes back is what was computed."""
    flags = ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1", "--dtype", "float32")
    tier = ("--max-total-tokens", "512", "--hierarchical-cache-gb", "0.1", "--tp-size", size)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(400)] for _ in range(3)]
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}

    def turn(server: Server) -> list[dict[str, Any]]:
        return [server.ask("/generate", input_ids=ids, sampling_params=params) for ids in prompts]

    with running(*flags, *tier) as server:
        fresh, again = turn(server), turn(server)
        memory = server.info()["internal_states"][0]["memory_usage"]
    assert memory["host_tokens"] > 512
    if memory["restore_least"] > 300:
        pytest.skip("when the server started this machine was so busy that copying seemed dear")
    assert [reply["meta_info"]["cached_tokens"] for reply in fresh] == [0, 0, 0]
    for first, second in zip(fresh, again, strict=True):
        assert second["meta_info"]["cached_tokens_details"]["host"] > 100
        assert second["output_ids"] == first["output_ids"]


@pytest.mark.slow
def test_three_ranks_of_the_default_model_answer_as_one(server: Server) -> None:
    """Three query heads and one KV head on each."""
    with running("--dtype", "float32", "--tp-size", "3") as three:
        assert ask(three, 24) == ask(server, 24)


@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ranks_agree_at_every_step(small_model: str, steps: int) -> None:
    """Four ranks with hash seeds of their own, clocks hours apart, and one of them slow now and then.

    The leader compares the digests of each step: a single difference would end the server.
    """
    flags = ("--model-path", small_model, "--tp-size", "4", *SMALL)
    with Stopwatch() as watch, running(*flags, module="faulty_ranks", env={**ENVIRONMENT, "CHAOS": "1"}) as server:
        done = threading.Event()
        clients = [Client(server, seed, watch, until=done, leaves=0.3) for seed in range(10)]
        rnd = random.Random(0)
        while server.info()["ranks"][0]["step"] < steps:
            time.sleep(0.05)
            if rnd.random() < 0.1:
                server.post("/flush_cache?timeout=0.2")
            if rnd.random() < 0.1:
                server.post("/abort_request", {"abort_all": True})
        done.set()
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive()
            assert not client.error
            assert client.wrong is None
        assert sum(client.answers for client in clients) > 0
        server.wait_idle()
        gauges = server.info()["internal_states"][0]
        for name in ("evicted_tokens_total", "retractions_total", "aborted_total", "finished_total"):
            assert gauges[name] > 0, name
        wait_until(lambda: len({rank["digest"] for rank in server.info()["ranks"]}) == 1, PATIENCE, lambda: server.log)
