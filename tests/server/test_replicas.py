"""Several engines behind one door answer as one does, share the work, and end together."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest
from faulty_ranks import ENVIRONMENT, expected
from rank_client import Client
from server_harness import Server, Stopwatch, at_once, running, wait_until
from shared.kv_subscriber import Subscriber

from srt.config import KvEventsConfig

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old man who had never seen a",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI am writing to you because",
]
POOL = 512
SMALL = ("--load-format", "dummy", "--context-length", "256", "--max-total-tokens", str(POOL))
SMALL += ("--max-running-requests", "6")


@pytest.fixture
def events() -> Iterator[KvEventsConfig]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield KvEventsConfig(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay")


def ask(server: Server, prompt: list[int], count: int) -> dict:
    reply = server.generate(prompt, count, temperature=1.0, sampling_seed=3)
    assert reply["output_ids"] == expected(prompt, 3, count)
    return reply["meta_info"]


def test_two_engines_are_one_server(small_model: str, events: KvEventsConfig) -> None:
    """Chats go where they were, every route tells of both, and routers hear what each has cached."""
    flags = ("--model-path", small_model, "--dp-size", "2", "--kv-events-config", json.dumps(to_json(events)), *SMALL)
    with Stopwatch() as watch, running(*flags, module="faulty_ranks", env=ENVIRONMENT) as server:
        subscribers = [Subscriber(events.endpoint_of(i), events.replay_endpoint_of(i)) for i in range(2)]
        chats = [[100 + number] * 64 for number in range(4)]
        first = [ask(server, chat, 2) for chat in chats]
        assert sorted(meta["dp_rank"] for meta in first) == [0, 0, 1, 1]
        again = [ask(server, [*chat, 7, 8], 2) for chat in chats]
        assert [meta["dp_rank"] for meta in again] == [meta["dp_rank"] for meta in first]
        assert [meta["cached_tokens"] for meta in again] == [64] * 4

        done = threading.Event()
        clients = [Client(server, seed, watch, until=done, leaves=0.3) for seed in range(4)]
        wait_until(lambda: has_evicted(server), 60, lambda: server.log)
        done.set()
        for client in clients:
            client.join(60)
            assert not client.is_alive()
            assert not client.error
            assert client.wrong is None
        server.wait_idle(10)
        info = server.info()
        assert (info["dp_size"], info["page_size"], info["kv_events"]["block_size"]) == (2, 16, 16)
        assert [(rank["dp_rank"], rank["rank"]) for rank in info["ranks"]] == [(0, 0), (1, 0)]
        states = info["internal_states"]
        assert all(state["finished_total"] > 2 for state in states)
        loads = server.get("/v1/loads").json["loads"]
        assert [(load["dp_rank"], load["max_total_num_tokens"]) for load in loads] == [(0, POOL), (1, POOL)]
        for subscriber, state in zip(subscribers, states, strict=True):
            subscriber.replay()
            assert 16 * len(subscriber.index.blocks) == state["pool_cached"]
        assert server.post("/flush_cache").status == 200
        for rank, subscriber in enumerate(subscribers):
            wait_until(lambda s=subscriber: bool(s.replay() or not s.index.blocks), 20, lambda: server.log)
            assert subscriber.index.blocks == {}
            assert subscriber.dp_ranks == [rank]
            subscriber.close()
        assert server.info()["pool"]["free"] == 2 * POOL

        os.kill(server.pid_of("engine 1 scheduler 0"), signal.SIGKILL)
        assert server.wait(20) == 1
        server.assert_nothing_left()
        assert "engine 1 scheduler 0" in server.log
        assert "was killed by SIGKILL" in server.log


def has_evicted(server: Server) -> bool:
    return all(state["evicted_tokens_total"] > 0 for state in server.info()["internal_states"])


def to_json(events: KvEventsConfig) -> dict[str, str]:
    return {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cache_aware", "round_robin"])
def test_engines_of_the_default_model_answer_as_one(server: Server, method: str) -> None:
    calls = [(prompt, count) for count in (12, 24) for prompt in PROMPTS]
    right = [server.generate(*call)["text"] for call in calls]
    with running(
        "--dtype", "float32", "--max-total-tokens", "4096", "--dp-size", "2", "--load-balance-method", method
    ) as two:
        replies = at_once([lambda call=call: two.generate(*call) for call in calls])
        assert [reply["text"] for reply in replies] == right
        assert {reply["meta_info"]["dp_rank"] for reply in replies} == {0, 1}


@pytest.mark.slow
def test_each_engine_may_have_several_ranks(small_model: str) -> None:
    flags = ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1", "--dtype", "float32")
    found = []
    for sizes in ((), ("--tp-size", "2", "--dp-size", "2")):
        with running(*flags, "--max-total-tokens", "2048", *sizes) as server:
            replies = at_once([lambda prompt=prompt: server.generate(prompt, 20) for prompt in PROMPTS])
            found.append([reply["output_ids"] for reply in replies])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_fault_in_one_engine_is_named(small_model: str) -> None:
    flags = ("--model-path", small_model, "--tp-size", "2", "--dp-size", "2", *SMALL)
    with Stopwatch() as watch, running(*flags, module="faulty_ranks", env=ENVIRONMENT) as server:
        clients = [Client(server, seed, watch) for seed in range(4)]
        os.kill(server.pid_of("engine 1 scheduler 1"), signal.SIGSTOP)
        for client in clients:
            client.join(60)
            assert not client.is_alive()
            assert client.wrong is None
        assert server.wait(20) == 1
        assert any("engine 1 scheduler 1" in client.error for client in clients), [c.error for c in clients]
