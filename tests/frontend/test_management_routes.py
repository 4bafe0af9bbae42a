"""The routes beside generation: what they report, what they ask of the engine, and who may call them."""

import threading

import pytest
from frontend_harness import MODEL, Server

import srt.frontend.management as management
from srt.board import Phase

pytestmark = pytest.mark.usefixtures("quiet_engine")

KEY = "k-test-123"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), max_running_requests=8) as running:
        yield running


def metric(server, name):
    _, headers, page = server.request("GET", "/metrics")
    assert headers["Content-Type"].startswith("text/plain")
    values = [line.rpartition(" ")[2] for line in page.decode().splitlines() if line.startswith(f"sglang:{name}{{")]
    assert len(values) == 1, name
    return float(values[0])


def test_health_and_readiness(server):
    for path in ("/health", "/ready", "/health_generate"):
        assert server.request("GET", path)[0] == 200
    assert server.request("HEAD", "/health")[0] == 200
    assert server.request("GET", "/")[0] == 200


def test_health_generate_needs_a_token(server, monkeypatch):
    monkeypatch.setattr(management, "PROBE_LIMIT", 0.2)
    server.engine.mute = True
    status, answer = server.get("/health_generate")
    assert status == 503
    assert "token" in answer["error"]["message"]
    assert server.get("/health")[0] == 200
    server.engine.mute = False
    monkeypatch.undo()
    assert server.get("/health_generate")[0] == 200


def test_health_generate_tells_a_failure(server):
    server.engine.fail_status = 500
    status, answer = server.get("/health_generate")
    server.engine.fail_status = 0
    assert status == 500
    assert "out of luck" in answer["error"]["message"]


def test_health_sees_a_hung_and_a_stopped_rank(server, monkeypatch):
    monkeypatch.setattr(management, "HEARTBEAT_LIMIT", -1.0)
    status, answer = server.get("/health")
    assert status == 503
    assert "Rank 0" in answer["error"]["message"]
    monkeypatch.undo()
    record = server.board.read(0)
    monkeypatch.setattr(type(server.board), "read", lambda self, rank: record.__class__(**stopped(record)))
    assert server.get("/health")[0] == server.get("/ready")[0] == 503


def test_health_sees_a_hung_detokenizer(server, monkeypatch):
    monkeypatch.setattr(management, "HEARTBEAT_LIMIT", 0.2)
    server.wait_for(lambda: server.get("/ready")[0] == 200)
    server.engine.silent = True
    server.wait_for(lambda: server.get("/ready")[0] == 503)
    status, answer = server.get("/health")
    assert status == 503
    assert "detokenizer" in answer["error"]["message"]
    server.engine.silent = False
    server.wait_for(lambda: server.get("/ready")[0] == 200)


def stopped(record):
    return {**vars(record), "phase": Phase.STOPPED}


def test_server_info(server):
    status, info = server.get("/server_info")
    assert status == 200
    assert server.get("/get_server_info")[0] == 200
    assert info["pool"] == {"total": 1000, "free": 900, "cached": 100, "locked": 0}
    assert info["page_size"] == 1
    assert info["ranks"][0]["rank"] == 0
    assert {"step", "digest"} <= info["ranks"][0].keys()
    assert info["max_total_num_tokens"] == 1024
    assert info["max_req_input_len"] == 1023
    memory = info["internal_states"][0]["memory_usage"]
    assert memory == {"weight_gb": 1e-6, "kv_cache_gb": 2e-6, "token_capacity": 1024, "host_tokens": 64}
    assert info["max_running_requests"] == 8
    assert info["served_model_name"] == MODEL


def test_model_info(server):
    status, info = server.get("/model_info")
    assert server.get("/get_model_info") == (status, info)
    assert (info["served_model_name"], info["is_generation"]) == (MODEL, True)
    assert info["architectures"] == ["TinyForCausalLM"]


def test_loads(server):
    status, answer = server.get("/v1/loads")
    assert status == 200
    (load,) = answer["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)
    server.engine.paused = True
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    thread = threading.Thread(target=server.post, args=("/generate", body))
    thread.start()
    server.wait_for(lambda: server.get("/v1/loads")[1]["loads"][0]["num_running_reqs"] == 1)
    assert server.get("/get_load")[1] == [{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 1}]
    assert metric(server, "num_running_reqs") == 1
    server.engine.paused = False
    thread.join()


def test_metrics_count(server):
    names = ("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "num_requests_total")
    before = {name: metric(server, name) for name in names}
    server.ok("/generate", {"text": "abcd", "sampling_params": {"max_new_tokens": 3}})
    after = {name: metric(server, name) for name in names}
    assert [after[name] - before[name] for name in names] == [4, 3, 2, 1]
    page = server.request("GET", "/metrics")[2].decode()
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        total = metric(server, f"{name}_count")
        assert total > 0
        assert f'sglang:{name}_bucket{{le="+Inf",model_name="tiny"}} {total:.0f}' in page
    assert 0 < metric(server, "cache_hit_rate") < 1


def test_flush_cache(server):
    for method in ("GET", "POST"):
        assert server.request(method, "/flush_cache")[0] == 200
    assert server.request("POST", "/flush_cache?timeout=30", {})[0] == 200
    server.engine.flush_ok = False
    status, answer = server.post("/flush_cache", {})
    assert status == 400
    assert "running" in answer["error"]["message"]
    for timeout in ("x", "-1", "nan", "inf", "1e9"):
        assert server.post(f"/flush_cache?timeout={timeout}", {})[0] == 400


def test_tokenize_and_back(server):
    status, answer = server.post("/tokenize", {"prompt": "aé<|im_end|>", "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == [97, 195, 169, 257]
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert (answer["count"], answer["max_model_len"]) == (4, 1024)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (
        200, {"text": "aé<|im_end|>", "prompt": "aé<|im_end|>"}
    )  # fmt: skip
    assert server.post("/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": True})[1]["text"] == "aé"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/v1/tokenize", chat)[1]["count"] == 21
    assert server.post("/detokenize", {"tokens": []})[1]["text"] == ""
    for body in ({}, {"prompt": "a", **chat}, {"prompt": 5}, {"prompt": "a", "model": "other"}):
        assert server.post("/tokenize", body)[0] in (400, 404)
    for body in ({}, {"tokens": [300]}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": [10**30]}):
        assert server.post("/detokenize", body)[0] == 400


def test_version(server):
    assert server.get("/version")[1].keys() == {"version"}


def test_request_ids(server):
    assert server.request("GET", "/health", headers={"X-Request-ID": "abc-1"})[1]["X-Request-ID"] == "abc-1"
    odd = server.request("GET", "/health", headers={"X-Request-ID": "a" * 500})[1]["X-Request-ID"]
    assert len(odd) == 32


def test_api_key(tmp_path):
    with Server(tmp_path, api_key=KEY) as server:
        for method, path in [
            ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/generate"),
            ("POST", "/flush_cache"),
            ("POST", "/abort_request"), ("GET", "/server_info"), ("GET", "/v1/models"), ("GET", "/v1/loads"),
            ("POST", "/tokenize"), ("GET", "/nope"), ("GET", "/page/data"), ("GET", "/page/node"),
        ]:  # fmt: skip
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "é"}):
                encoded = {name: value.encode() for name, value in headers.items()}
                status, _, raw = server.request(method, path, {} if method == "POST" else None, encoded)
                assert status == 401, (method, path)
                assert b'"authentication_error"' in raw
        for path in ("/", "/health", "/ready", "/metrics", "/health_generate"):
            assert server.request("GET", path)[0] == 200
        assert server.request("POST", "/generate", {"text": "a"}, AUTH)[0] == 200
        status, _, raw = server.request("GET", "/server_info", headers=AUTH)
        assert status == 200
        assert KEY.encode() not in raw


def test_one_of_several_api_keys_will_do(tmp_path):
    with Server(tmp_path, api_key="first,second") as server:
        for key, expected in (("first", 200), ("second", 200), ("first,second", 401), ("fir", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert server.request("GET", "/v1/models", headers=headers)[0] == expected


def test_who_sends_another_api_key_shares_no_prefix(tmp_path):
    bodies = {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    }
    with Server(tmp_path, cache_isolation="api-key") as server:
        spaces = {}
        for path, body in bodies.items():
            for key in (None, "a", "b"):
                for salt in (None, "s"):
                    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
                    assert server.request("POST", path, {**body, "cache_salt": salt}, headers)[0] == 200
                    spaces.setdefault((key, salt), set()).add(server.engine.received[-1].namespace)
    assert [len(space) for space in spaces.values()] == [1] * 6, "the same on all routes"
    assert len(set.union(*spaces.values())) == 6
    assert not any(b"Bearer" in space for space in set.union(*spaces.values()))
