"""Several engines behind one frontend: each hears what concerns it, and every route tells of all."""

import socket

import pytest
from frontend_harness import Server, send_request

import srt.frontend.management as management


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, dp_size=2, max_running_requests=2, max_queued_requests=1) as running:
        yield running


def send(server, body):
    """A stream whose answer is not waited for."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    send_request(sock, "/generate", {**body, "stream": True})
    return sock


def generate(server, text, **fields):
    return server.ok("/generate", {"text": text, "sampling_params": {"max_new_tokens": 4}, **fields})


def test_a_conversation_stays_and_another_goes_elsewhere(server):
    first, second = ["a" * 300, "b" * 300]
    homes = [generate(server, text)["meta_info"]["dp_rank"] for text in (first, second)]
    assert sorted(homes) == [0, 1]
    for _ in range(3):
        first, second = first + "x" * 9, second + "y" * 9
        assert [generate(server, text)["meta_info"]["dp_rank"] for text in (second, first)] == homes[::-1]
    assert [len(engine.received) for engine in server.engines] == [4, 4]
    generate(server, first, cache_salt="s")
    assert server.services.metrics.engines[0].cache_hit_rate > 0


def test_an_abort_reaches_the_engine_that_runs_it(server):
    for engine in server.engines:
        engine.paused = True
    streams = [send(server, {"text": name * 300, "rid": name}) for name in "ab"]
    server.wait_for(lambda: all(engine.live for engine in server.engines))
    (rid,) = server.engines[1].live
    streams[1].close()
    server.wait_for(lambda: server.engines[1].aborted == [rid])
    server.post_raw("/abort_request", {"rid": "a"})
    server.wait_for(lambda: len(server.engines[0].aborted) == 1)
    streams[0].close()


def test_a_flush_is_of_all_engines_and_fails_if_one_refuses(server):
    assert server.request("POST", "/flush_cache")[0] == 200
    server.engines[1].flush_ok = False
    status, answer = server.post("/flush_cache", {})
    assert status == 400
    assert "requests are running" in answer["error"]["message"]


def test_loads_and_metrics_have_an_entry_for_each_engine(server):
    assert [load["dp_rank"] for load in server.get("/v1/loads")[1]["loads"]] == [0, 1]
    assert [load["dp_rank"] for load in server.get("/get_load")[1]] == [0, 1]
    info = server.get("/server_info")[1]
    assert (info["dp_size"], info["pool"]["total"], len(info["internal_states"])) == (2, 2000, 2)
    assert [(rank["dp_rank"], rank["rank"]) for rank in info["ranks"]] == [(0, 0), (1, 0)]
    page = server.request("GET", "/metrics")[2].decode()
    for rank in "01":
        assert f'sglang:max_total_num_tokens{{model_name="tiny",dp_rank="{rank}"}} 1000' in page
    assert 'sglang:num_requests_total{model_name="tiny"} 0' in page
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(dict.fromkeys(types))


def test_health_names_the_engine_that_is_silent(server, monkeypatch):
    assert server.request("GET", "/health")[0] == 200
    server.engines[1].stop()
    monkeypatch.setattr(management, "HEARTBEAT_LIMIT", 0.3)
    server.wait_for(lambda: server.get("/health")[0] == 503)
    assert "Rank 0 of engine 1" in server.get("/health")[1]["error"]["message"]


def test_the_queue_is_as_long_as_all_engines_let_it_be(server):
    for engine in server.engines:
        engine.paused = True
    sockets = [send(server, {"text": "q"}) for _ in range(5)]
    server.wait_for(lambda: sum(len(engine.live) for engine in server.engines) == 5)
    assert server.get("/ready")[0] == 503
    assert server.post("/generate", {"text": "q"})[0] == 503
    for sock in sockets:
        sock.close()
    server.wait_for(lambda: server.get("/ready")[0] == 200)
