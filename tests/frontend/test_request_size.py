"""What one HTTP request makes large is bounded, and what is allowed harms nobody else."""

import socket
import threading

import pytest
from frontend_harness import Server, events_of, send_request

from srt.frontend import answers, generation, services, streaming
from srt.frontend.native import GenerateFormat

pytestmark = pytest.mark.usefixtures("quiet_engine")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "a"}]
MANY = {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1}
LONG = [97] * 1000
RATED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128, "sampling_params": {}}
TOO_LARGE = {
    "stop strings": (COMPLETIONS, {**MANY, "stop": [f"{i:04}" + "x" * 4000 for i in range(32)]}),
    "a grammar": (COMPLETIONS, {**MANY, "structured_outputs": {"choice": [f"{i:02}" + "y" * 98 for i in range(90)]}}),
    "biases": (COMPLETIONS, {**MANY, "logit_bias": {str(i): 1 for i in range(256)}}),
    "prompts rated": (GENERATE, {**RATED, "input_ids": [LONG] * 17}),
    "choices rated": (COMPLETIONS, {"prompt": LONG, "echo": True, "logprobs": 20, "n": 100, "max_tokens": 1}),
    "rated again and again": (
        GENERATE, {**RATED, "text": "a", "top_logprobs_num": 0, "token_ids_logprob": [1] * 256, "stream": True,
                   "sampling_params": {"max_new_tokens": 1023, "ignore_eos": True}},
    ),
    "rated again and again by many": (
        GENERATE, {**RATED, "text": "a", "stream": True, "sampling_params": {"max_new_tokens": 600, "n": 64}},
    ),
    "a long prompt rated again and again": (
        GENERATE, {**RATED, "input_ids": LONG, "token_ids_logprob": [1] * 256, "stream": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LARGE)
def test_too_much_for_one_request_is_refused_with_advice(server, case):
    path, body = TOO_LARGE[case]
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert "fewer" in answer["error"]["message"]
    assert not server.engine.received


SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}}
LARGE = {
    "a schema for many": (CHAT, {"messages": HI, "n": 128, "json_schema": SCHEMA}),
    "stops for many": (COMPLETIONS, {"prompt": ["a"] * 8, "n": 64, "stop": ["x" * 50] * 32}),
    "biases for many": (COMPLETIONS, {"prompt": "a", "n": 128, "logit_bias": {str(i): 1 for i in range(256)}}),
    "many prompts rated": (COMPLETIONS, {"prompt": [[98] * 100] * 300, "echo": True, "logprobs": 1}),
    "alternatives": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20,
                            "max_tokens": 900}),
    "a rated stream": (GENERATE, {**RATED, "text": "a", "top_logprobs_num": 20, "stream": True,
                                  "sampling_params": {"max_new_tokens": 1000}}),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_what_is_large_and_usual_is_taken(server, case):
    path, body = LARGE[case]
    server.engine.says = [97]  # and is done, whatever was asked
    assert server.request("POST", path, body)[0] == 200


def test_an_answer_with_too_many_log_probabilities_ends(server, monkeypatch):
    monkeypatch.setattr(generation, "MAX_RATINGS", 1000)
    server.engine.step_s = 0.001
    body = {"prompt": "a", "n": 4, "logprobs": 5, "max_tokens": 900, "ignore_eos": True}
    status, answer = server.post(COMPLETIONS, body)
    assert status == 400
    assert "fewer" in answer["error"]["message"]
    server.wait_for(lambda: len(server.engine.aborted) == 4)


def test_a_long_answer_is_written_while_others_are_served(server, monkeypatch):
    written, went_on = GenerateFormat.body, threading.Event()

    def body(*arguments):
        assert went_on.wait(60)
        return written(*arguments)

    monkeypatch.setattr(GenerateFormat, "body", body)
    long = {**RATED, "input_ids": LONG, "sampling_params": {"max_new_tokens": 1}}
    answered = []
    asking = threading.Thread(target=lambda: answered.append(server.post(GENERATE, long)))
    asking.start()
    server.wait_for(lambda: server.engine.received)
    server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 3})
    went_on.set()
    asking.join(60)
    assert len(answered[0][1]["meta_info"]["input_top_logprobs"]) == 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {**RATED, "text": "abc", "return_text_in_logprobs": True}),
        (COMPLETIONS, {"prompt": ["abc", "de"], "n": 2, "echo": True, "logprobs": 3}),
        (CHAT, {"messages": HI, "logprobs": True, "prompt_logprobs": 2, "max_tokens": 9}),
        ("/v1/responses", {"input": "abc", "top_logprobs": 2, "max_output_tokens": 9}),
    ],
)  # fmt: skip
def test_long_and_short_answers_say_the_same(server, monkeypatch, path, body):
    short = server.ok(path, body)
    monkeypatch.setattr(services, "SMALL_ANSWER", 0)
    monkeypatch.setattr(answers, "MEMBERS", 2)
    monkeypatch.setattr(answers, "PIECE", 100)
    assert _without_names(server.ok(path, body)) == _without_names(short)


def _without_names(answer):
    """Nor times."""
    if isinstance(answer, list):
        return list(map(_without_names, answer))
    if not isinstance(answer, dict):
        return answer
    mine = {"id", "created", "created_at", "e2e_latency", "response_sent_to_client_ts", "timeline"}
    return {name: _without_names(value) for name, value in answer.items() if name not in mine}


@pytest.mark.parametrize("reads", [True, False])
def test_one_turn_writes_little_of_a_stream(server, monkeypatch, reads):
    """Whether its client reads or much of it waits."""
    monkeypatch.setattr(streaming, "TURN", 50)
    if not reads:
        monkeypatch.setattr(streaming, "SOFT_LIMIT", -1)
    server.engine.tokens_per_step = 4
    turns, (write, flush) = [0], (GenerateFormat.events, streaming.Stream.flush)

    def counted(form, one, delta):
        turns[-1] += generation.ratings(delta)
        return write(form, one, delta)

    def turn(stream):
        turns.append(0)
        flush(stream)

    monkeypatch.setattr(GenerateFormat, "events", counted)
    monkeypatch.setattr(streaming.Stream, "flush", turn)
    sampling = {"max_new_tokens": 40, "n": 8}
    body = {**RATED, "text": "abc", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 99}
    events = events_of(server.request("POST", GENERATE, {**body, "stream": True})[2])
    assert sum(turns) == 8 * (2 + 40) * 100
    assert max(turns) <= 50 * streaming.RATINGS_PER_DELTA + 4 * 100 + 200  # up to one delta more, maybe with a prompt's
    for index in range(8):
        mine = [event for event in events if event["index"] == index]
        metas = [event["meta_info"] for event in mine]
        assert [meta["completion_tokens"] for meta in metas] == [len(event["output_ids"]) for event in mine]
        assert [len(meta["output_top_logprobs"]) for meta in metas] == [len(event["output_ids"]) for event in mine]
        assert [meta["finish_reason"] is None for meta in metas] == [True] * (len(mine) - 1) + [False]
        assert len(mine[-1]["output_ids"]) == 40


def test_log_probabilities_that_wait_count(server, monkeypatch):
    monkeypatch.setattr(streaming, "SOFT_LIMIT", -1)
    monkeypatch.setattr(streaming, "HARD_LIMIT", 1000)
    server.engine.hold_at = 20
    sampling = {"max_new_tokens": 40, "n": 8}
    sock, received = server.open_stream(GENERATE, {**RATED, "text": "abc", "sampling_params": sampling})
    with sock:
        while not received.endswith(b"0\r\n\r\n"):
            assert (more := sock.recv(65536))
            received += more
    assert b"reads too slowly" in received


def test_who_does_not_even_read_the_first_event_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "HARD_LIMIT", 100)
    monkeypatch.setattr(streaming, "CUT_SECONDS", 0.1)
    server = Server(tmp_path, context_length=2048, pool_tokens=2048)
    with socket.socket() as sock:
        for end in (server.listeners[0], sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with server:
            sock.connect(("127.0.0.1", server.port))
            body = {"prompt": LONG, "echo": True, "logprobs": 20, "max_tokens": 1000, "ignore_eos": True}
            send_request(sock, COMPLETIONS, {**body, "stream": True})
            server.wait_for(lambda: server.engine.aborted)
