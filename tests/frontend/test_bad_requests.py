"""Requests that cannot be served: each gets a 4xx that names the fault, and the server goes on."""

import gzip
import http.client
import json
import socket
import time
import zlib

import pytest
from frontend_harness import MODEL, Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt.frontend.protocol import ChatRequest, CompletionRequest, GenerateRequest, NativeSampling

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]


def refused(server, path, body, status=400, mentions=None):
    got, headers, raw = server.request("POST", path, body)
    assert got == status, raw[:300]
    assert headers["Content-Type"].startswith("application/json")
    assert len(raw) < 4096
    assert b"Traceback" not in raw
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    if mentions is not None:
        assert mentions == error["param"] or mentions in error["message"], error
    return error


BAD_NUMBERS = [
    ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e300), ("temperature", [1]),
    ("top_p", 1.5), ("top_p", -0.1), ("top_p", "x"), ("top_k", -2), ("top_k", 1.5), ("top_k", False), ("min_p", 2),
    ("min_p", -1), ("presence_penalty", 3), ("frequency_penalty", -2.5), ("repetition_penalty", 0),
    ("repetition_penalty", -1), ("n", 0), ("n", -1), ("n", 100000), ("n", True), ("n", 1.5), ("n", 10**30),
    ("stop", [1]), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 33), ("stop", "x" * 5000), ("stop", {}),
    ("stop_token_ids", [-1]), ("stop_token_ids", [300]), ("stop_token_ids", ["a"]), ("stop_token_ids", [10**30]),
    ("stop_token_ids", [1] * 300), ("logit_bias", {"999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 5}),
    ("logit_bias", {"5": 1000}), ("logit_bias", {"5": "x"}), ("logit_bias", {"": 1}), ("logit_bias", {"٣": 1}),
    ("logit_bias", {str(i): 1 for i in range(1100)}), ("logit_bias", [5]), ("logit_bias", {"1" * 5000: 1}),
    ("ignore_eos", 1), ("skip_special_tokens", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_sampling_out_of_range(server, name, value):
    refused(server, CHAT, {"messages": HI, name: value}, mentions=name)
    refused(server, COMPLETIONS, {"prompt": "a", name: value, "stream": True}, mentions=name)
    refused(server, GENERATE, {"text": "a", "sampling_params": {name: value}}, mentions=name)


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"'1'", b"undefined"])
def test_numbers_that_are_not_json(server, literal):
    refused(server, COMPLETIONS, b'{"prompt": "a", "temperature": ' + literal + b"}")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body(server, body):
    refused(server, CHAT, body, mentions="the body is empty")


@pytest.mark.parametrize(("path", "name"), [(CHAT, "messages"), ("/detokenize", "tokens"), ("/v1/responses", "input")])
def test_a_field_that_is_missing(server, path, name):
    assert refused(server, path, {}, mentions=f"required field `{name}`")["param"] == name


def test_where_a_body_is_no_json(server):
    assert refused(server, CHAT, b'{"model": "a",}')["message"] == "Invalid JSON: trailing comma in object (byte 14)"


OPENAI_FAULTS = [
    ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 10**12), ("max_tokens", "x"), ("max_tokens", 5.5),
    ("max_tokens", True), ("seed", "x"), ("seed", 1.5), ("seed", 2**70), ("min_tokens", -1), ("min_tokens", 10**12),
    ("priority", 2**40), ("priority", "x"), ("rid", 5), ("rid", "x" * 1000), ("cache_salt", 5), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("stream_options", 5), ("model", 5), ("nonsense", 1), ("max_token", 5),
    ("response_format", {"type": "json"}), ("response_format", {}), ("response_format", "text"),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("regex", "[a-"), ("regex", 5), ("ebnf", "root ::= x"), ("ebnf", "nothing like it"), ("json_schema", "{"),
    ("json_schema", "[]"), ("json_schema", {"properties": [{}]}), ("structural_tag", {"type": "structural_tag"}),
    ("echo", "x"), ("lora_path", "x"),
    ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("return_hidden_states", True), ("bad_words", ["x"]),
    ("custom_logit_processor", "x"),
    ("structured_outputs", {"regex": "("}), ("structured_outputs", {"jsn": {}}), ("structured_outputs", "a"),
    ("structured_outputs", {"choice": []}), ("structured_outputs", {"json": {}, "whitespace_pattern": "x"}),
    ("guided_json", {"type": "object"}), ("stop_regex", "a+"),
    ("session_params", {"id": "x"}), ("bootstrap_room", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OPENAI_FAULTS)
def test_openai_fields(server, name, value):
    refused(server, CHAT, {"messages": HI, name: value}, mentions=name)
    refused(server, COMPLETIONS, {"prompt": "a", name: value}, mentions=name)


CHAT_FAULTS = [
    {}, {"messages": None}, {"messages": []}, {"messages": "hi"}, {"messages": [5]}, {"messages": [{}]},
    {"messages": [{"role": "alien", "content": "x"}]}, {"messages": [{"role": 5, "content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "nonsense"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A"}}]}]},
    {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    {"messages": HI, "top_logprobs": 3}, {"messages": HI, "logprobs": True, "top_logprobs": 25},
    {"messages": HI, "logprobs": True, "top_logprobs": 100000}, {"messages": HI, "logprobs": 3},
    {"messages": HI, "logprobs": True, "top_logprobs": -1}, {"messages": HI, "max_completion_tokens": 0},
    {"messages": [*HI, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
    {"messages": HI, "tools": [{}], "tool_choice": "auto"}, {"messages": HI, "functions": [{"name": "f"}]},
    {"messages": HI, "chat_template": "x"}, {"messages": HI, "chat_template_kwargs": "x"},
    {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}},
    {"messages": HI, "chat_template_kwargs": {"messages": []}}, {"messages": HI, "chat_template_kwargs": {"self": 1}},
    {"messages": HI, "chat_template_kwargs": {"tokenize": True, "conversation": []}},
    {"messages": HI, "chat_template_kwargs": {"add_generation_prompt": False}},
    {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
    {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
    {"messages": HI, "audio": {"voice": "x"}}, {"messages": HI, "prompt": "x"},
    {"messages": [{"role": "user", "content": "word " * 20000}]},
]  # fmt: skip


@pytest.mark.parametrize("body", CHAT_FAULTS, ids=range(len(CHAT_FAULTS)))
def test_chats(server, body):
    refused(server, CHAT, body)
    refused(server, CHAT, {**body, "stream": True})


def test_a_part_that_lacks_its_text(server):
    for kind, path, name in (("text", CHAT, "messages"), ("input_text", "/v1/responses", "input")):
        message = {"role": "user", "content": [{"type": kind}]}
        sentence = f"a part of type `{kind}` needs a `text`"
        refused(server, path, {name: [message]}, mentions=sentence)


@pytest.mark.parametrize(
    "prompt",
    [
        None, [], [[]], [[], [1]], {}, 5, True, [None], ["a", 1], [1, "a"], [1.5], [[1], 2], [[["a"]]], [-1], [300],
        [[300]], [10**30], [5279552648203111001], [True], ["a"] * 3000,
    ],
)  # fmt: skip
def test_prompts(server, prompt):
    refused(server, COMPLETIONS, {"prompt": prompt}, mentions="prompt")


def test_completion_faults(server):
    refused(server, COMPLETIONS, {}, mentions="prompt")
    refused(server, COMPLETIONS, {"prompt": "a", "logprobs": 21}, mentions="logprobs")
    refused(server, COMPLETIONS, {"prompt": "a", "logprobs": True}, mentions="logprobs")
    refused(server, COMPLETIONS, {"prompt": "a", "best_of": 3, "stream": True}, mentions="best_of")
    refused(server, COMPLETIONS, {"prompt": "a", "best_of": 3, "n": 4}, mentions="best_of")
    refused(server, COMPLETIONS, {"prompt": "a", "best_of": 129}, mentions="best_of")
    refused(server, COMPLETIONS, {"prompt": "a", "prompt_logprobs": 2, "stream": True}, mentions="prompt_logprobs")
    refused(server, CHAT, {"messages": HI, "echo": True}, mentions="echo")
    refused(server, COMPLETIONS, {"prompt": "a", "suffix": "b"}, mentions="suffix")
    refused(server, COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, mentions="n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", '{"input": "x", "max_output_tokens": 1, "stream": true, "metadata": {"a": %s}}'),
        ("/v1/responses", '{"input": "x", "max_output_tokens": 1, "background": true, "metadata": {"a": %s}}'),
        ("/v1/chat/completions", '''{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools":
            [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}], "tool_choice": "none"}'''),
    ],
)  # fmt: skip
def test_what_is_nested_as_deep_as_can_be_read(server, path, body):
    for depth in range(900, 1100, 4):  # somewhere here it cannot be written any more, and then not be read
        code, _, raw = server.request("POST", path, (body % ("[" * depth + "]" * depth)).encode())
        assert code in (200, 400), raw


GENERATE_FAULTS = [
    {}, {"text": None}, {"text": 5}, {"text": []}, {"text": [5]}, {"input_ids": []}, {"input_ids": "abc"},
    {"input_ids": ["a"]}, {"input_ids": [-1]}, {"input_ids": [300]}, {"input_ids": [[1], [300]]}, {"input_ids": [1.5]},
    {"input_ids": [1000, 10**30]}, {"input_ids": {}}, {"text": "a", "input_ids": [1]}, {"text": "a", "unknown": 1},
    {"text": "a", "sampling_params": 5}, {"text": "a", "sampling_params": {"unknown": 1}},
    {"text": "a", "sampling_params": {"max_tokens": 5}}, {"text": "a", "sampling_params": {"max_new_tokens": -5}},
    {"text": "a", "sampling_params": {"regex": "("}},
    {"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}},
    {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
    {"text": "a", "sampling_params": [{}, {}]}, {"text": ["a", "b"], "sampling_params": [{}]},
    {"text": ["a", "b"], "rid": ["x"]}, {"text": ["a", "b"], "rid": ["x", "x"]}, {"text": "a", "rid": 5},
    {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9}, {"text": "a", "top_logprobs_num": -1},
    {"text": "a", "return_logprob": "yes"}, {"text": "a", "logprob_start_len": -2}, {"text": "a", "stream": 1},
    {"text": "a", "return_logprob": True, "logprob_start_len": 2}, {"text": "a", "token_ids_logprob": 5},
    {"text": "a", "token_ids_logprob": [300]}, {"text": "a", "token_ids_logprob": [[1], 2]},
    {"text": "a", "token_ids_logprob": [1] * 257}, {"text": "a", "token_ids_logprob": ["x"]},
    {"text": "a", "input_embeds": [[0.1]]}, {"text": "a", "image_data": "x"}, {"text": "a", "lora_path": "x"},
    {"text": "a", "bootstrap_host": "127.0.0.9"}, {"text": "a", "is_warmup": True},
    {"text": "a", "return_entropy": True},
    {"text": ["a", "b"], "cache_salt": ["x"]}, {"text": "a", "priority": 10**10}, {"text": "x" * 2000},
    {"text": ["a"] * 3000},
]  # fmt: skip


@pytest.mark.parametrize("body", GENERATE_FAULTS, ids=range(len(GENERATE_FAULTS)))
def test_generate(server, body):
    refused(server, GENERATE, body)


BROKEN = [
    b"{", b"[]", b"", b"null", b"5", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100000, b'{"a":' * 50000,
    b'{"prompt": "a"} x', b'{"prompt": "a",}', b"\x00", b'{"metadata": ' + b"[" * 100000,
    b'{"logit_bias": {"\\ud800": 1}}', b'{"%b\\n": 1}' % (b" - at `" * 50000),
]  # fmt: skip


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
def test_broken_bodies(server, raw):
    for path in (CHAT, COMPLETIONS, GENERATE, "/tokenize", "/detokenize", "/abort_request"):
        refused(server, path, raw)


def test_the_edge_of_the_context(server):
    answer = server.ok(GENERATE, {"input_ids": [1] * 1018, "sampling_params": {"max_new_tokens": 6}})
    assert answer["meta_info"]["completion_tokens"] == 6
    for count, new in ((1018, 7), (1024, 1), (1025, 1), (3000, 1)):
        body = {"input_ids": [1] * count, "sampling_params": {"max_new_tokens": new}}
        error = refused(server, GENERATE, body, mentions="context length")
        assert error["code"] == "context_length_exceeded"
    refused(server, CHAT, {"messages": [{"role": "user", "content": "x" * 1010}]}, mentions="context length")


def test_larger_than_the_pool(tmp_path):
    with Server(tmp_path, context_length=4096, pool_tokens=512) as server:
        error = refused(server, GENERATE, {"input_ids": [1] * 900}, mentions="KV cache")
        assert error["code"] == "context_length_exceeded"


def test_a_model_without_template_and_bos(tmp_path):
    with Server(tmp_path, bos=None, template=False) as server:
        refused(server, CHAT, {"messages": HI}, mentions="--chat-template")
        assert server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1})


def test_bodies_that_are_too_big(server):
    for path in (CHAT, GENERATE, "/tokenize"):
        assert refused(server, path, b"x" * (1 << 24), 413)["code"] == "request_too_large"
    refused(server, CHAT, {"messages": [{"role": 5, "content": "x" * 200}] * 6000}, 413)


def test_a_chunked_body_that_is_too_big(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", CHAT, iter([b"x" * 65536] * 40), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["message"]
    connection.close()


PACKED = gzip.compress(b'{"prompt": "ab", "max_tokens": 2}')
PLAIN_DEFLATE = zlib.compress(b'{"prompt": "ab", "max_tokens": 2}')


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (PACKED, "gzip", 200), (b"no such thing", "gzip", 400), (b"no such thing", "deflate", 400),
        (PACKED + b"more", "gzip", 400), (PACKED[:-12], "gzip", 400), (b"", "gzip", 400),
        (gzip.compress(bytes(1 << 24)), "gzip", 413), (PACKED, "GZIP", 200), (PACKED, "br", 415), (PACKED, "zstd", 415),
        (PACKED, "gzip, gzip", 415), (PACKED, "compress", 415), (PLAIN_DEFLATE, "deflate", 200),
        (PLAIN_DEFLATE[2:-4], "deflate", 200), (PLAIN_DEFLATE[:-5], "deflate", 400), (b"", "deflate", 400),
        (zlib.compress(bytes(1 << 24)), "deflate", 413), (PACKED * 2, "gzip", 400),
    ],
    ids=range(18),
)  # fmt: skip
def test_encoded_bodies(server, caplog, body, encoding, status):
    got, _, raw = server.request("POST", COMPLETIONS, body, {"Content-Encoding": encoding})
    assert got == status, raw
    assert (got == 200) == ("choices" in json.loads(raw))
    assert not caplog.records


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 413), ("/nope", 404)])
def test_a_short_body_that_was_long_costs_little(server, path, status):
    zeros = gzip.compress(bytes(10_000_000)) * 100  # a gigabyte
    began = time.process_time()
    assert server.request("POST", path, zeros, {"Content-Encoding": "gzip"})[0] == status
    assert server.request("GET", "/health")[0] == 200
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 10000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_http(server, caplog, raw):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(raw)
        assert sock.recv(4096).split()[1] == b"400"
    assert not caplog.records


def test_errors_do_not_echo_the_input(server):
    marker = "MARKER" * 200
    for path, body in [
        (CHAT, {"messages": [{"role": marker, "content": "x"}]}), (CHAT, {"messages": HI, "model": marker}),
        (CHAT, {"messages": HI, marker: 1}), (GENERATE, {"text": "a", "sampling_params": {marker: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": marker}]}]}),
    ]:  # fmt: skip
        status, _, raw = server.request("POST", path, body)
        assert 400 <= status < 500
        assert len(raw) < 1000


def test_routes_and_methods(server):
    for method, path, expected in [
        ("GET", CHAT, 405), ("DELETE", GENERATE, 405), ("POST", "/health", 405), ("POST", "/nope", 404),
        ("GET", "/v1", 404), ("GET", "/..%2f..%2fetc/passwd", 404), ("GET", "//generate", 404),
        ("GET", "/v1/models/%ff%00", 404),
    ]:  # fmt: skip
        status, headers, raw = server.request(method, path)
        assert status == expected, (method, path)
        sentence = json.loads(raw)["error"]["message"]
        assert (status == 405) == ("Allow" in headers) == (f"not {method}" in sentence)


def test_prompts_and_errors_stay_out_of_the_log(server, caplog):
    server.post(CHAT, {"messages": [{"role": "user", "content": "MARKER-7f3a"}], "temperature": -1})
    server.ok(CHAT, {"messages": [{"role": "user", "content": "MARKER-7f3a"}], "max_tokens": 1})
    server.get("/health")
    assert "MARKER" not in caplog.text
    assert "/health" not in caplog.text


# ---- anything at all ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-3, 12) | st.floats(allow_nan=False)
    | st.text(max_size=8) | st.sampled_from(["auto", "none", "text", "user", MODEL, "a"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "5", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def bodies(kind, base):
    """A good body with some of its fields, and perhaps an unknown one, set to anything."""
    names = st.sampled_from([*kind.__struct_fields__, "unknown"])
    return st.dictionaries(names, VALUES, max_size=4).map(lambda changes: {**base, **changes})


REQUESTS = (
    bodies(ChatRequest, {"messages": HI, "max_tokens": 2}).map(lambda body: (CHAT, body))
    | bodies(CompletionRequest, {"prompt": "ab", "max_tokens": 2}).map(lambda body: (COMPLETIONS, body))
    | bodies(GenerateRequest, {"text": "ab", "sampling_params": {"max_new_tokens": 2}}).map(
        lambda body: (GENERATE, body)
    )
    | bodies(NativeSampling, {"max_new_tokens": 2}).map(
        lambda params: (GENERATE, {"text": "ab", "sampling_params": params})
    )
    | st.binary(max_size=40).map(lambda raw: (CHAT, raw))
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(REQUESTS)
def test_nothing_makes_the_server_fail(server, request_):
    path, body = request_
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, answer = server.request("POST", path, raw)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


def test_afterwards_all_is_well(server):
    assert server.ok(COMPLETIONS, {"prompt": "abc", "max_tokens": 3})["choices"][0]["text"] == "abc"
    server.wait_for(lambda: not server.engine.live)
    assert not server.services.manager._live
    assert not server.services.manager.tally._names
