"""What one HTTP request makes large is bounded, and what is allowed harms nobody else."""

import pytest
from frontend_harness import Server

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as running:
        yield running


@pytest.fixture
def server(running):
    running.engine.reset()
    return running


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
    "a schema for many": (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 128, "json_schema": SCHEMA}),
    "stops for many": (COMPLETIONS, {"prompt": ["a"] * 8, "n": 64, "stop": ["x" * 50] * 32}),
    "biases for many": (COMPLETIONS, {"prompt": "a", "n": 128, "logit_bias": {str(i): 1 for i in range(256)}}),
    "many prompts rated": (COMPLETIONS, {"prompt": [[98] * 100] * 300, "echo": True, "logprobs": 1}),
    "alternatives": (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20,
                            "max_tokens": 900}),
    "a rated stream": (GENERATE, {**RATED, "text": "a", "top_logprobs_num": 20, "stream": True,
                                  "sampling_params": {"max_new_tokens": 1000}}),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_what_is_large_and_usual_is_taken(server, case):
    path, body = LARGE[case]
    server.engine.says = [97]  # and is done, whatever was asked
    assert server.request("POST", path, body)[0] == 200
