"""The OpenAI routes over a real socket: what comes back, in one piece and streamed, and what the engine was asked."""

import codecs
import json
import socket

import openai
import pytest
from frontend_harness import BOS, EOS, MODEL

from srt.frontend.protocol import ChatRequest, CompletionRequest
from srt.frontend.sampling import mix_seed
from srt.messages import unpack_ids

pytestmark = pytest.mark.usefixtures("quiet_engine")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
HI_IDS = [BOS, *b"user\nhi", EOS, *b"\n", BOS, *b"assistant\n"]


def sent(server):
    return server.engine.received[-1]


# ---- completions ----------------------------------------------------------------------------------------------------


def test_completion(server):
    answer = server.ok(COMPLETIONS, {"model": MODEL, "prompt": "hello", "max_tokens": 7})
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {
            "index": 0, "text": "hellohe", "logprobs": None, "finish_reason": "length", "matched_stop": None,
            "stop_reason": None,
        }
    ]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "reasoning_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_completion_default_length(server):
    assert server.ok(COMPLETIONS, {"prompt": "ab"})["choices"][0]["text"] == "ab" * 8


def test_default_length_stops_at_the_context(server):
    answer = server.ok(COMPLETIONS, {"prompt": [7] * 1020})
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_shapes_of_a_prompt(server, prompt):
    assert server.ok(COMPLETIONS, {"prompt": prompt, "max_tokens": 4})["choices"][0]["text"] == "abca"
    assert unpack_ids(sent(server).ids).tolist() == [97, 98, 99]


def test_a_prompt_with_much_space_around_it(server):
    body = b'{"prompt":' + b" " * 100 + b"[\n\t" + b" " * 100 + b'[97, 98]], "max_tokens": 2}'
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "ab"


def test_several_prompts_with_several_choices(server):
    answer = server.ok(COMPLETIONS, {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["aba", "aba", "xyz", "xyz"]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_large_prompt_is_read_in_a_thread(server):
    text = "word " * 180
    body = {"prompt": text, "max_tokens": 1, "user": "x" * 70_000}
    assert server.ok(COMPLETIONS, body)["usage"]["prompt_tokens"] == 900


def test_empty_prompt_begins_with_bos(server):
    assert server.ok(COMPLETIONS, {"prompt": "", "max_tokens": 1})["usage"]["prompt_tokens"] == 1
    assert unpack_ids(sent(server).ids).tolist() == [BOS]


def test_a_written_bos_is_not_doubled(server):
    server.ok(COMPLETIONS, {"prompt": "<|im_start|>a", "max_tokens": 1})
    assert unpack_ids(sent(server).ids).tolist() == [BOS, 97]


def test_a_byte_order_mark(server):
    body = codecs.BOM_UTF8 + json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "abc"


def test_nul_and_lone_surrogates(server):
    body = rb'{"prompt": "a\u0000b\ud83d", "max_tokens": 6}'
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "a\x00b\ufffd"


def test_completion_logprobs(server):
    choice = server.ok(COMPLETIONS, {"prompt": "hé", "max_tokens": 4, "logprobs": 5})["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "h"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 11, 21]
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5, "j": -2.5, "k": -9999.0, "l": -9999.0}


def test_echo(server):
    body = {"prompt": "hé", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = server.ok(COMPLETIONS, body)["choices"][0]
    assert choice["text"] == "héh\ufffd"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "h", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 11, 21, 22]
    assert logprobs["top_logprobs"][:2] == [None, {"bytes:\\xc3": -0.5}]
    assert (sent(server).sampling.prompt_logprobs, sent(server).sampling.prompt_logprobs_start) == (1, 0)


def test_echo_of_ids_without_an_answer(server):
    answer = server.ok(COMPLETIONS, {"prompt": [[97, 98], [99]], "max_tokens": 0, "echo": True, "logprobs": 0})
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[None, -0.5], [None]]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, 3)


def test_echo_without_logprobs_computes_none(server):
    assert server.ok(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "echo": True})["choices"][0]["text"] == "aba"
    assert sent(server).sampling.prompt_logprobs == -1


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2}])
def test_streamed_echo_equals_the_other(server, extra):
    body = {"prompt": ["abé", "x"], "max_tokens": 4, "echo": True, **extra}
    choices = server.ok(COMPLETIONS, body)["choices"]
    for choice in choices:
        events = [event["choices"][0] for event in server.stream(COMPLETIONS, body)]
        own = [event for event in events if event["index"] == choice["index"]]
        assert "".join(event["text"] for event in own) == choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for event in own for value in event["logprobs"][name]] == values


def test_the_best_of_many(server):
    """The engine rates all alike, so of each prompt the first are kept; the others cost tokens all the same."""
    answer = server.ok(COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 2, "n": 1, "best_of": 3})
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ab"), (1, "cd")]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 12


def test_prompt_logprobs_by_id(server):
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 2}
    expected = {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
    }
    assert server.ok(COMPLETIONS, body)["choices"][0]["prompt_logprobs"] == [None, expected]
    said = server.ok(CHAT, {"messages": HI, "max_tokens": 1, "prompt_logprobs": 0})["prompt_logprobs"]
    assert len(said) == len(unpack_ids(sent(server).ids))
    assert said[1] == {"117": {"logprob": -0.5, "rank": None, "decoded_token": "u"}}


def test_completion_logprobs_without_alternatives(server):
    choice = server.ok(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "logprobs": 0})["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]


def test_completion_stream(server):
    events = server.stream(COMPLETIONS, {"prompt": "héé", "max_tokens": 6})
    assert "".join(event["choices"][0]["text"] for event in events) == "hééh"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert sum(event["choices"][0]["finish_reason"] is not None for event in events) == 1
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_completion_stream_with_usage(server):
    body = {"prompt": ["ab", "cd"], "max_tokens": 3, "n": 2, "stream_options": {"include_usage": True}}
    *events, last = server.stream(COMPLETIONS, body)
    texts = [""] * 4
    for event in events:
        assert event["usage"] is None
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["aba", "aba", "cdc", "cdc"]
    assert last["choices"] == []
    assert last["usage"] == server.ok(COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 3, "n": 2})["usage"]


def test_completion_stream_with_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [3, 3]


def test_streamed_completion_logprobs_equal_the_others(server):
    body = {"prompt": "abé", "max_tokens": 7, "logprobs": 2}
    whole = server.ok(COMPLETIONS, body)["choices"][0]["logprobs"]
    joined = {key: [] for key in whole}
    for event in server.stream(COMPLETIONS, body):
        for key, items in event["choices"][0]["logprobs"].items():
            joined[key] += items
    assert joined == whole


# ---- how it ends ----------------------------------------------------------------------------------------------------


def test_stop_string(server):
    body = {"prompt": "abcdef", "stop": ["de", "zz"], "max_tokens": 50}
    choice = server.ok(COMPLETIONS, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert (choice["matched_stop"], choice["stop_reason"]) == ("de", "de")
    assert sent(server).sampling.stop == (b"de", b"zz")
    assert "".join(event["choices"][0]["text"] for event in server.stream(COMPLETIONS, body)) == "abc"


@pytest.mark.parametrize("name", ["no_stop_trim", "include_stop_str_in_output"])
def test_stop_string_kept(server, name):
    body = {"prompt": "abcdef", "stop": "de", "max_tokens": 50, name: True}
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "abcde"


def test_stop_token(server):
    choice = server.ok(COMPLETIONS, {"prompt": "abcdef", "stop_token_ids": [99], "max_tokens": 50})["choices"][0]
    assert (choice["text"], choice["matched_stop"], choice["stop_reason"]) == ("ab", 99, 99)


def test_eos_is_no_stop_reason(server):
    choice = server.ok(COMPLETIONS, {"prompt": [97, EOS], "max_tokens": 50})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert (choice["matched_stop"], choice["stop_reason"]) == (EOS, None)


def test_ignore_eos_and_special_tokens(server):
    body = {"prompt": [97, EOS], "max_tokens": 4, "ignore_eos": True}
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "aa"
    body["skip_special_tokens"] = False
    assert server.ok(COMPLETIONS, body)["choices"][0]["text"] == "a<|im_end|>a<|im_end|>"


# ---- chat -----------------------------------------------------------------------------------------------------------


def test_chat(server):
    answer = server.ok(CHAT, {"model": MODEL, "messages": HI, "max_tokens": 5})
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "user", "reasoning_content": None, "tool_calls": None
    }  # fmt: skip
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(HI_IDS)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(HI_IDS) // 2
    assert unpack_ids(sent(server).ids).tolist() == HI_IDS


def test_chat_takes_the_rest_of_the_context(server):
    server.ok(CHAT, {"messages": HI, "stop": "u", "max_tokens": None})
    assert sent(server).sampling.max_new_tokens == 1024 - len(HI_IDS)


def test_max_completion_tokens_wins(server):
    server.ok(CHAT, {"messages": HI, "max_tokens": 9, "max_completion_tokens": 5})
    assert sent(server).sampling.max_new_tokens == 5


def test_text_parts_equal_a_string(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    server.ok(CHAT, {"messages": parts, "max_tokens": 1})
    assert unpack_ids(sent(server).ids).tolist() == HI_IDS


def test_developer_speaks_as_system(server):
    server.ok(CHAT, {"messages": [{"role": "developer", "content": "be brief"}, *HI], "max_tokens": 1})
    assert bytes(unpack_ids(sent(server).ids).tolist()[1:7]) == b"system"


def test_continue_final_message(server):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    server.ok(CHAT, {"messages": messages, "continue_final_message": True, "max_tokens": 1})
    assert unpack_ids(sent(server).ids).tolist() == [*HI_IDS, *b"I am"]


def test_no_generation_prompt(server):
    server.ok(CHAT, {"messages": HI, "add_generation_prompt": False, "max_tokens": 1})
    assert unpack_ids(sent(server).ids).tolist() == HI_IDS[: -len(b"assistant\n") - 1]


def test_null_for_every_optional_field(server):
    server.ok(CHAT, {**dict.fromkeys(ChatRequest.__struct_fields__), "messages": HI, "stop": "u"})
    server.ok(COMPLETIONS, {**dict.fromkeys(CompletionRequest.__struct_fields__), "prompt": "a"})


def test_fields_without_effect_are_taken(server):
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False,
        "log_metrics": True, "separate_reasoning": True, "stream_reasoning": True, "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "logprobs": False,
        "return_hidden_states": False, "continue_final_message": False, "prompt_cache_key": "k",
    }  # fmt: skip
    server.ok(CHAT, {"messages": HI, "max_tokens": 1, **ignored})


def test_chat_logprobs(server):
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 4}
    content = server.ok(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["<|im_start|>", "u", "s"]
    assert content[1]["bytes"] == [117]
    assert content[1]["logprob"] == -0.5
    assert [top["token"] for top in content[1]["top_logprobs"]] == ["u", "v", "w", "x"]
    assert [top["logprob"] for top in content[1]["top_logprobs"]] == [-0.5, -1.5, -2.5, -9999.0]
    streamed = []
    for event in server.stream(CHAT, body):
        streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == content
    without = server.ok(CHAT, {**body, "top_logprobs": 0})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[], [], []]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_chat_stream(server, tokens_per_step):
    server.engine.tokens_per_step = tokens_per_step
    events = server.stream(CHAT, {"messages": HI, "max_tokens": 6, "n": 2, "stream_options": {"include_usage": True}})
    *events, last = events
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == len(HI_IDS)
    assert last["usage"]["completion_tokens"] == 12
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in mine[1:-1]) == "user\n"
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None for choice in mine[:-1])


def test_a_stream_of_nothing_but_its_end(server):
    """One special token: no text at all."""
    events = server.stream(CHAT, {"messages": HI, "max_tokens": 1})
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]


def test_a_stream_for_an_old_client(server):
    """HTTP/1.0 knows no chunks: the end of the connection is the end of the stream."""
    raw = b'{"prompt": "abc", "max_tokens": 5, "stream": true}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw))
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


# ---- sampling, as it reaches the engine -----------------------------------------------------------------------------


def test_sampling_parameters_arrive(server):
    body = {
        "prompt": "a", "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1,
        "logit_bias": {"7": 2, "5": -1.5}, "seed": 11, "priority": -3,
    }  # fmt: skip
    server.ok(COMPLETIONS, body)
    sampling = sent(server).sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (3, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.2, 1.1)
    assert sampling.logit_bias == ((5, -1.5), (7, 2.0))
    assert (sampling.seed, sampling.logprobs, sent(server).priority) == (11, -1, -3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1e-7}, {"temperature": 0.0}),
        ({"temperature": 1e-5}, {"temperature": 1e-5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"seed": 2**63 + 5}, {"seed": 5}),
    ],
)
def test_edges_of_sampling(server, given, expected):
    server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **given})
    assert {name: getattr(sent(server).sampling, name) for name in expected} == expected


def test_seeds_of_choices(server):
    server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "seed": 11, "n": 4})
    seeds = [request.sampling.seed for request in server.engine.received]
    assert seeds == [mix_seed(11, i) for i in range(4)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 4


def test_without_a_seed_every_request_draws_one(server):
    for _ in range(3):
        server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert len({request.sampling.seed for request in server.engine.received}) == 3


def test_namespaces(server):
    spaces = []
    for keys in (
        {},
        {"cache_salt": ""},
        {"cache_salt": "ab"},
        {"extra_key": "ab"},
        {"cache_salt": "a", "extra_key": "b"},
    ):
        server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **keys})
        spaces.append(sent(server).namespace)
    assert spaces[0] == spaces[1] == b""
    assert len(set(spaces)) == 4


# ---- models and the official client ---------------------------------------------------------------------------------


def test_models(server):
    status, answer = server.get("/v1/models")
    assert status == 200
    (card,) = answer["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1024)
    assert server.get(f"/v1/models/{MODEL}") == (200, card)
    assert server.get("/v1/models/other/name")[0] == 404


def test_unknown_model(server):
    status, answer = server.post(CHAT, {"model": "no-such-model", "messages": HI})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"
    server.ok(CHAT, {"model": "/models/tiny", "messages": HI, "max_tokens": 1})
    server.ok(CHAT, {"model": "", "messages": HI, "max_tokens": 1})


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_openai_client(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    chat = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=5, logprobs=True)
    assert chat.choices[0].message.content == "user"
    assert len(chat.choices[0].logprobs.content) == 5
    assert chat.usage.prompt_tokens_details.cached_tokens == len(HI_IDS) // 2
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "user"
    assert chunks[-1].usage.completion_tokens == 5
    completion = client.completions.create(model=MODEL, prompt="abc", max_tokens=2, extra_body={"top_k": 3})
    assert completion.choices[0].text == "ab"


def test_openai_client_reads_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"


def test_no_line_of_an_event_ends_where_unicode_ends_one(server):
    """Some clients split a stream there, too."""
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1cé"
    _, _, raw = server.request("POST", COMPLETIONS, {"prompt": text, "max_tokens": 40, "stream": True})
    *lines, done = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line]
    assert done == "[DONE]"
    assert text in "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_whole_number_may_have_a_point(server):
    body = b'{"prompt": "at 1.0 \\" 2.0", "max_tokens": 7.0, "n": 2.00, "temperature": 1.0, "echo": true}'
    answer = server.ok(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == ['at 1.0 " 2.0at 1.0 '] * 2
    assert server.ok(COMPLETIONS, b'{"prompt": [97.0, 98], "max_tokens": 2}')["choices"][0]["text"] == "ab"
    for number in ("2.5", "2.05", "2.0e-1", "1e400"):
        status, _, said = server.request("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": %b}' % number.encode())
        assert status == 400, said
