"""Where the time of a request goes: its marks are in order, its stretches add up, and each is observed once."""

from __future__ import annotations

import json
import re
import socket
import time

import msgspec
import pytest
from frontend_harness import Server, events_of

from srt.observe.timeline import MARKS, NAMES, Timeline

pytestmark = pytest.mark.usefixtures("quiet_engine")

SAMPLING = {"max_new_tokens": 3, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), metrics_names="lockstep,sglang,vllm") as running:
        yield running


def check(timeline, wall):
    assert list(timeline) == list(NAMES)
    assert min(timeline.values()) >= 0
    assert 0 < sum(timeline.values()) <= wall


def timed(call, *arguments):
    began = time.monotonic()
    return call(*arguments), time.monotonic() - began


def test_generate_always_tells(server):
    server.engine.step_s = 0.02
    answer, wall = timed(server.ok, "/generate", {"text": "abc", "sampling_params": SAMPLING})
    timeline = answer["meta_info"]["timeline"]
    check(timeline, wall)
    assert timeline["tokenize"] > 0
    assert timeline["decode"] >= 0.04
    events, wall = timed(server.stream, "/generate", {"text": "abc", "sampling_params": SAMPLING})
    check(events[-1]["meta_info"]["timeline"], wall)
    assert "timeline" not in events[0]["meta_info"]


@pytest.mark.parametrize(
    ("path", "source"), [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "abc"})]
)
def test_openai_routes_tell_if_asked(server, path, source):
    body = {**source, "max_tokens": 3, "n": 2}
    assert "timeline" not in server.ok(path, body)["choices"][0]
    answer, wall = timed(server.ok, path, {**body, "return_timeline": True})
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        check(choice["timeline"], wall)
        assert (choice["timeline"]["render"] > 0) == ("messages" in source)
    events, wall = timed(server.stream, path, {**body, "return_timeline": True})
    told = [choice for event in events for choice in event["choices"] if "timeline" in choice]
    assert [choice["finish_reason"] for choice in told] == ["length", "length"]
    for choice in told:
        check(choice["timeline"], wall)


def test_of_many_choices_the_best_tell(server):
    body = {"prompt": "abc", "max_tokens": 3, "n": 2, "best_of": 4, "return_timeline": True}
    answer, wall = timed(server.ok, "/v1/completions", body)
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        check(choice["timeline"], wall)


def test_who_wants_no_tokens_has_a_prompt_and_no_decode(server):
    def prompt_tokens():
        page = server.request("GET", "/metrics")[2].decode()
        return int(re.search(r"^lockstep:prompt_tokens_total\{\S* (\d+)$", page, re.MULTILINE)[1])

    before = prompt_tokens()
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "return_timeline": True}
    timeline = server.ok("/v1/completions", body)["choices"][0]["timeline"]
    assert timeline["prefill"] > 0
    assert timeline["decode"] == 0
    assert prompt_tokens() == before + 3


def test_headers_tell_the_same(server):
    _, headers, raw = server.request("POST", "/generate", {"text": "abc", "sampling_params": SAMPLING})
    timeline = json.loads(raw)["meta_info"]["timeline"]
    assert json.loads(headers["x-lockstep-timeline"]) == timeline
    assert float(headers["x-lockstep-total"]) == pytest.approx(sum(timeline.values()), abs=2e-5)


def test_a_kept_connection_starts_anew_with_each_request(server):
    server.ok("/generate", {"text": "abc", "sampling_params": SAMPLING})
    body = json.dumps({"text": "abc", "sampling_params": SAMPLING, "stream": True}).encode()
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(2):
        began = time.monotonic()
        connection.request("POST", "/generate", body)
        timeline = events_of(connection.getresponse().read())[-1]["meta_info"]["timeline"]
        check(timeline, time.monotonic() - began)
        time.sleep(0.05)
    connection.close()


@pytest.mark.parametrize("cut", [10, 60, -5])
def test_a_request_has_come_with_its_first_bytes(server, cut):
    """In its first line, its headers or its body: what comes late is waited for in `parse`. Idle time is not."""
    body = json.dumps({"text": "abc", "sampling_params": SAMPLING}).encode()
    raw = b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Pad: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        b"x" * 80,
        len(body),
        body,
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        shown = 0  # a busy machine may read the first bytes with the last ones
        while shown < 2:
            time.sleep(0.1)
            began = time.monotonic()
            sock.sendall(raw[:cut])
            time.sleep(0.05)
            sock.sendall(raw[cut:])
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(65536)
            timeline = json.loads(answer.partition(b"\r\n\r\n")[2])["meta_info"]["timeline"]
            check(timeline, time.monotonic() - began)
            shown += timeline["parse"] >= 0.04


def test_the_rest_of_a_refused_body_belongs_to_no_other_request(server):
    body = json.dumps({"text": "abc", "sampling_params": SAMPLING}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 404")
        sock.sendall(b"ab")
        time.sleep(0.1)
        began = time.monotonic()
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(65536)
        check(json.loads(answer.partition(b"\r\n\r\n")[2])["meta_info"]["timeline"], time.monotonic() - began)


def test_marks_never_go_back():
    timeline = Timeline(1.0)
    received = timeline.received
    timeline.parsed, timeline.sent, timeline.taken = received + 1, received + 0.5, received + 2
    marks = timeline.marks()
    assert len(marks) == len(MARKS)
    assert marks == sorted(marks)
    stretches = timeline.stretches()
    assert stretches.parse == pytest.approx(1)
    assert stretches.deliver == pytest.approx(1)
    assert sum(msgspec.structs.astuple(stretches)) == pytest.approx(2)


# ---- metrics --------------------------------------------------------------------------------------------------------


def observations(server):
    """By series, how often each histogram has been observed."""
    page = server.request("GET", "/metrics")[2].decode()
    return {name: float(value) for name, value in re.findall(r"^(\S+_count\{\S*\}) (\S+)$", page, re.MULTILINE)}


@pytest.mark.parametrize("stream", [False, True])
def test_two_scrapes_around_a_request_differ_by_one_in_each_histogram(server, stream):
    before = observations(server)
    assert sum("stretch=" in name for name in before) == len(NAMES)
    assert len({name.partition(":")[0] for name in before}) == 3
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    for _ in range(40):
        if stream:
            server.stream("/generate", body)
        else:
            server.ok("/generate", body)
        after = observations(server)
        assert {name: count - before[name] for name, count in after.items()} == dict.fromkeys(after, 1)
        before = after


def test_aborted_requests_and_errors_are_counted_and_not_observed(server):
    before = observations(server)
    server.engine.fail_status = 503
    assert server.post("/generate", {"text": "abc"})[0] == 503
    assert server.post("/generate", {"text": 1})[0] == 400
    assert observations(server) == before
    page = server.request("GET", "/metrics")[2].decode()
    assert 'lockstep:errors_total{model_name="tiny",status="400"} 1' in page
    assert 'lockstep:errors_total{model_name="tiny",status="503"} 1' in page
    assert 'lockstep:requests_aborted_total{model_name="tiny"} 1' in page
    assert 'vllm:cache_config_info{model_name="tiny",engine="0",block_size="1",num_gpu_blocks="1000"} 1' in page


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_ends_is_observed_whatever_becomes_of_its_answer(server, stream):
    """Its sibling fails, or nobody writes it to a client."""

    def counts():
        page = server.request("GET", "/metrics")[2].decode()
        names = ("requests_total", "e2e_request_latency_seconds_count")
        return [int(re.search(rf"^lockstep:{name}\{{\S* (\d+)$", page, re.MULTILINE)[1]) for name in names]

    before = counts()
    server.engine.fail_status, server.engine.fail_after = 503, 3
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 9}]
    server.request("POST", "/generate", {"text": ["abc", "abcd"], "sampling_params": params, "stream": stream})
    server.engine.reset()
    assert counts() == [count + 1 for count in before]
    assert server.request("GET", "/health_generate")[0] == 200
    assert counts() == [count + 2 for count in before]
