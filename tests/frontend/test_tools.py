"""Tools and reasoning on the chat route: what the model is shown, and what comes back, in one piece and streamed."""

import json
import time

import openai
import pytest
from frontend_harness import EOS, Server

from srt.frontend.openai.messages import with_tools_as_text
from srt.frontend.protocol import Message
from srt.messages import unpack_ids

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
NAMED = {"type": "function", "function": {"name": "ping"}}

# Shows tools, calls and results in the way of the hermes family, and thinks.
THINKING = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
MARKED = """\
{%- for message in messages %}{{ message.content }}{% endfor %}{% if tools %}[AVAILABLE_TOOLS]{% endif %}
{%- if calls %}[TOOL_CALLS]{% endif %}"""
OPENED = """\
{%- if tools %}<tool_call> arguments {% endif %}{% for message in messages %}{{ message.content }}{% endfor %}[THINK]
{#- [/THINK] #}"""
UNKNOWN = "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """By the name of the template; "plain" knows nothing of tools."""
    started = {
        "plain": Server(tmp_path_factory.mktemp("a")),
        "thinking": Server(tmp_path_factory.mktemp("b"), template=THINKING),
        "marked": Server(tmp_path_factory.mktemp("c"), template=MARKED, specials=("[TOOL_CALLS]",)),
        "opened": Server(tmp_path_factory.mktemp("f"), template=OPENED, specials=("[THINK]", "[/THINK]")),
        "bare": Server(tmp_path_factory.mktemp("e"), template=UNKNOWN, tool_call_parser="llama3"),
        "unknown": Server(tmp_path_factory.mktemp("d"), template=UNKNOWN),
    }
    for server in started.values():
        server.__enter__()
    yield started
    for server in started.values():
        server.__exit__()


@pytest.fixture(autouse=True)
def quiet_engines(servers):
    yield
    for server in servers.values():
        server.engine.reset()


def ids_of(server, text):
    return server.tokenizer.encode(text, False)


def prompt_of(server):
    return server.tokenizer.decode(unpack_ids(server.engine.received[-1].ids).tolist(), False)


def answers(server, said, **body):
    """The message and finish of an answer `said`, which must be the same streamed, in steps of any size."""
    server.engine.says = ids_of(server, said)
    server.engine.tokens_per_step = 1000
    body = {"messages": HI, "max_tokens": 500, **body}
    whole = server.ok(CHAT, body)
    (choice,) = whole["choices"]
    for tokens_per_step in (1, 7, 1000):
        server.engine.tokens_per_step = tokens_per_step
        *events, last = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
        assert joined(events) == (without_ids(choice["message"]), choice["finish_reason"])
        assert last["usage"] == whole["usage"]
    return choice["message"], choice["finish_reason"], whole["usage"]


def joined(events):
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    message = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
    for delta in deltas[1:-1]:
        (field,) = delta
        if field == "tool_calls":
            (part,) = delta["tool_calls"]
            calls = message["tool_calls"] = message["tool_calls"] or []
            if part["index"] == len(calls):
                assert part["id"]
                assert part["type"] == "function"
                calls.append({"index": part["index"], "function": {"name": part["function"]["name"], "arguments": ""}})
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        else:
            message[field] = (message[field] or "") + delta[field]
    if message["tool_calls"]:
        message["content"] = message["content"] or None
    return message, events[-1]["choices"][0]["finish_reason"]


def without_ids(message):
    calls = message["tool_calls"]
    if calls is not None:
        assert len({call["id"] for call in calls}) == len(calls)
        assert all(call["type"] == "function" for call in calls)
        calls = [{"index": call["index"], "function": call["function"]} for call in calls]
    return {**message, "tool_calls": calls}


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Öslo \\"}{\\""}}\n</tool_call>'
ARGUMENTS = '{"city": "Öslo \\"}{\\""}'


def test_a_call(servers):
    message, reason, usage = answers(servers["thinking"], CALL, tools=TOOLS)
    assert calls_of(message) == [("get_weather", ARGUMENTS)]
    assert (message["content"], message["reasoning_content"], reason) == (None, None, "tool_calls")
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert usage["reasoning_tokens"] == 0


def test_thoughts_text_and_calls(servers):
    said = f'<think>\nHm <tool_call>\n</think>\n\nI see.\n\n{CALL}\n<tool_call>{{"name": "ping"}}</tool_call>'
    message, reason, usage = answers(servers["thinking"], said, tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("Hm <tool_call>", "I see.")
    assert calls_of(message) == [("get_weather", ARGUMENTS), ("ping", "{}")]
    assert reason == "tool_calls"
    assert usage["reasoning_tokens"] == len("<think>\nHm <tool_call>\n</think>")


@pytest.mark.parametrize(
    "said", [CALL.replace("get_weather", "other"), '<tool_call>\n{"name": ', "<tool_call>", "<tool"]
)
def test_what_is_no_call_is_text(servers, said):
    message, reason, _ = answers(servers["thinking"], said, tools=TOOLS)
    assert (message["content"], message["tool_calls"], reason) == (said, None, "stop")


def test_what_no_grammar_holds_to_its_form_is_text_until_it_is_whole(servers):
    said = '{"name": "ping", "parameters": {"a": [1, 2}}'
    message, reason, _ = answers(servers["bare"], said, tools=TOOLS)
    assert (message["content"], message["tool_calls"], reason) == (said, None, "stop")


def test_a_call_that_the_length_cuts(servers):
    said, length = CALL + CALL, len(CALL.encode()) + 30
    message, reason, _ = answers(servers["thinking"], said, tools=TOOLS, max_tokens=length)
    assert len(message["tool_calls"]) == 1
    assert reason == "length"
    for choice in ("auto", "required"):
        message, reason, _ = answers(servers["thinking"], CALL, tools=TOOLS, tool_choice=choice, max_tokens=62)
        ((name, arguments),) = calls_of(message)
        assert name == "get_weather"
        assert ARGUMENTS.startswith(arguments)
        assert reason == "length"


def test_without_tools_nothing_is_a_call(servers):
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message, reason, _ = answers(servers["thinking"], CALL, **body)
        assert (message["content"], message["tool_calls"], reason) == (CALL, None, "stop")


def test_one_call_at_most(servers):
    message, _, _ = answers(servers["thinking"], CALL + CALL, tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1
    assert message["content"] == CALL


def test_marks_that_are_special_tokens(servers):
    server = servers["marked"]
    said = 'So [TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {"a": 1}}]'
    message, reason, _ = answers(server, said, tools=TOOLS)
    assert (message["content"], reason) == ("So", "tool_calls")
    assert calls_of(message) == [("ping", "{}"), ("ping", '{"a": 1}')]
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in message["tool_calls"])
    server.ok(CHAT, {"messages": HI, "max_tokens": 1, "tools": TOOLS, "tool_choice": "none"})
    mark = server.tokenizer.token_id("[TOOL_CALLS]")
    assert server.engine.received[-1].sampling.logit_bias == ((mark, -100.0),)


def test_reasoning_fields(servers):
    server, said = servers["thinking"], "<think>one two three</think>four"
    message, _, usage = answers(server, said)
    assert (message["reasoning_content"], message["content"]) == ("one two three", "four")
    assert usage["reasoning_tokens"] == len(said) - len("four")
    message, _, usage = answers(server, said, separate_reasoning=False)
    assert (message["reasoning_content"], message["content"]) == (None, said)
    assert usage["reasoning_tokens"] == len(said) - len("four")
    message, _, _ = answers(server, said, include_reasoning=False)
    assert (message["reasoning_content"], message["content"]) == (None, "four")
    answers(server, said, stream_reasoning=False)
    server.engine.tokens_per_step = 1
    events = server.stream(CHAT, {"messages": HI, "max_tokens": 99, "stream_reasoning": False})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta for delta in deltas if "reasoning_content" in delta] == [{"reasoning_content": "one two three"}]
    server.ok(CHAT, {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}})
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")


def test_reasoning_in_special_tokens_that_the_prompt_begins(servers):
    server = servers["opened"]
    end = server.tokenizer.token_id("[/THINK]")
    message, reason, usage = answers(server, f"hm\n[/THINK]\n{CALL}", tools=TOOLS, tool_choice="required")
    assert (message["reasoning_content"], message["content"], reason) == ("hm", None, "tool_calls")
    assert calls_of(message) == [("get_weather", ARGUMENTS)]
    assert usage["reasoning_tokens"] == len("hm\n") + 1
    assert server.engine.received[-1].grammar.starts_after == end
    body = {"messages": HI, "max_tokens": 99, "response_format": {"type": "json_object"}}
    server.engine.says = ids_of(server, 'hm[/THINK]{"a": 1}')
    assert server.ok(CHAT, body)["choices"][0]["message"]["content"] == '{"a": 1}'
    assert server.engine.received[-1].grammar.starts_after == end


def test_logprobs_of_every_token_come_along(servers):
    server = servers["thinking"]
    said = f"<think>é</think>Text {CALL}"
    server.engine.says = ids_of(server, said)
    body = {"messages": HI, "tools": TOOLS, "logprobs": True, "max_tokens": 500}
    whole = server.ok(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert len(whole) == len(said.encode()) + 1
    streamed = []
    for event in server.stream(CHAT, body):
        streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == whole


def test_choices_do_not_mix(servers):
    server = servers["thinking"]
    server.engine.says = ids_of(server, CALL)
    choices = server.ok(CHAT, {"messages": HI, "tools": TOOLS, "n": 3, "max_tokens": 500})["choices"]
    assert [calls_of(choice["message"]) for choice in choices] == [[("get_weather", ARGUMENTS)]] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    events = server.stream(CHAT, {"messages": HI, "tools": TOOLS, "n": 3, "max_tokens": 500})
    for index in range(3):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        assert calls_of(joined(mine)[0]) == [("get_weather", ARGUMENTS)]


# ---- what the model is shown ----------------------------------------------------------------------------------------

CHAT_WITH_CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}},
            {"id": "b", "type": "function", "function": {"name": "ping", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "12 C"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "pong"}]},
    {"role": "user", "content": "Thanks"},
]


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", NAMED])
def test_the_template_gets_the_tools(servers, choice):
    server = servers["thinking"]
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    server.ok(CHAT, {"messages": HI, "tools": [strict, PING], "tool_choice": choice, "max_tokens": 1})
    assert prompt_of(server).startswith(f"<tools>{json.dumps(WEATHER)}{json.dumps(PING)}</tools><|im_start|>user")


def test_the_template_gets_calls_and_results(servers):
    server = servers["thinking"]
    server.ok(CHAT, {"messages": CHAT_WITH_CALLS, "max_tokens": 1})
    assert prompt_of(server) == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12 C<|im_end|>\n<|im_start|>tool\npong<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_that_does_not_know_tools_gets_text(servers):
    server = servers["plain"]
    server.ok(CHAT, {"messages": CHAT_WITH_CALLS, "tools": TOOLS, "max_tokens": 1})
    system, rest = prompt_of(server).split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n")
    assert json.dumps(WEATHER["function"]) + "\n" + json.dumps(PING["function"]) in system
    assert rest == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12 C\n</tool_response>\n<tool_response>\npong\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )
    system_first = [{"role": "system", "content": "Be brief."}, *HI]
    server.ok(CHAT, {"messages": system_first, "tools": TOOLS, "max_tokens": 1})
    assert prompt_of(server).startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    message, _, _ = answers(server, CALL, tools=TOOLS)
    assert calls_of(message) == [("get_weather", ARGUMENTS)]


@pytest.mark.slow
def test_many_results_are_shown_in_linear_time():
    results = [Message("tool", "x" * 100)] * 50_000
    began = time.process_time()
    (shown,) = with_tools_as_text(results, ())
    assert shown["content"].count("</tool_response>\n<tool_response>") == 49_999
    assert time.process_time() - began < 5


def test_what_clients_send_for_no_content_is_the_same(servers):
    for name in ("plain", "thinking"):
        prompts = []
        for content in ({"content": None}, {"content": ""}, {"content": []}, {}):
            message = {"role": "assistant", "tool_calls": CHAT_WITH_CALLS[1]["tool_calls"], **content}
            servers[name].ok(CHAT, {"messages": [HI[0], message, *HI], "max_tokens": 1})
            prompts.append(prompt_of(servers[name]))
        assert len(set(prompts)) == 1


@pytest.mark.parametrize("arguments", ["[1]", "{oops", '"x"', '{"a": 1', "[" * 5000])
def test_arguments_that_are_no_object_are_shown_as_text(servers, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    servers["plain"].ok(CHAT, {"messages": messages, "max_tokens": 1}) if len(arguments) < 900 else None
    status, _ = servers["thinking"].post(CHAT, {"messages": messages, "max_tokens": 1})
    assert status == (200 if len(arguments) < 900 else 400)


def test_a_stop_string_does_not_cut_a_call_that_must_come(servers):
    server = servers["thinking"]
    body = {"messages": HI, "tools": TOOLS, "stop": ["}"], "stop_token_ids": [7], "max_tokens": 1}
    for choice, stop, ids in (("auto", (b"}",), (7,)), ("required", (), ()), (NAMED, (), ())):
        server.ok(CHAT, {**body, "tool_choice": choice})
        sampling = server.engine.received[-1].sampling
        assert (sampling.stop, sampling.stop_token_ids) == (stop, ids)


def test_the_clients_bias_stays_beside_ours(servers):
    server = servers["marked"]
    mark = server.tokenizer.token_id("[TOOL_CALLS]")
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    server.ok(CHAT, {**body, "logit_bias": {"5": 2}})
    assert server.engine.received[-1].sampling.logit_bias == ((5, 2.0), (mark, -100.0))
    server.ok(CHAT, {**body, "logit_bias": {str(mark): 2}})
    assert server.engine.received[-1].sampling.logit_bias == ((mark, 2.0),)


def test_tokenize_shows_the_same_prompt(servers):
    for server in servers.values():
        server.ok(CHAT, {"messages": CHAT_WITH_CALLS, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})
        ids = server.ok("/tokenize", {"messages": CHAT_WITH_CALLS, "tools": TOOLS})["tokens"]
        assert ids == unpack_ids(server.engine.received[-1].ids).tolist()
    assert servers["plain"].post("/tokenize", {"messages": HI, "tools": [{}]})[0] == 400


def test_tokenize_takes_what_else_makes_a_prompt(tmp_path):
    template = "{{ mood }}{{ reasoning_effort }}{% for message in messages %}{{ message.content }}!{% endfor %}"
    with Server(tmp_path, template=template) as server:
        more = {"chat_template_kwargs": {"mood": "glad"}, "reasoning_effort": "low", "continue_final_message": True}
        server.ok(CHAT, {"messages": HI, "max_tokens": 1, **more})
        ids = server.ok("/tokenize", {"messages": HI, **more})["tokens"]
        assert (
            ids == unpack_ids(server.engine.received[-1].ids).tolist() == list(b"gladlow" + HI[0]["content"].encode())
        )


# ---- what makes no sense --------------------------------------------------------------------------------------------

BAD = [
    {"tool_choice": "required"}, {"tools": [], "tool_choice": "required"}, {"tool_choice": NAMED},
    {"tools": [WEATHER], "tool_choice": NAMED}, {"tools": [WEATHER], "tool_choice": "always"},
    {"tools": [WEATHER], "tool_choice": {"type": "function"}}, {"tools": [WEATHER], "tool_choice": 5},
    {"tools": [WEATHER, WEATHER]}, {"tools": [{}]}, {"tools": ["x"]}, {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function"}]}, {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
    {"tools": [PING] * 2000}, {"parallel_tool_calls": "x"},
    {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
    {"tools": TOOLS, "tool_choice": NAMED, "regex": "a"},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD)
def test_bad_tools(servers, body):
    status, answer = servers["thinking"].post(CHAT, {"messages": HI, "max_tokens": 1, **body})
    assert status == 400
    assert answer["error"]["param"] in (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "regex",
        "messages",
    )


def test_an_unknown_form_of_calls(servers):
    server = servers["unknown"]
    status, answer = server.post(CHAT, {"messages": HI, "tools": TOOLS, "max_tokens": 1})
    assert status == 400
    assert "--tool-call-parser" in answer["error"]["message"]
    server.ok(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})
    said = '[{"name": "ping", "parameters": {}}]'
    message, reason, _ = answers(server, said, tools=TOOLS, tool_choice="required")
    assert (calls_of(message), reason) == ([("ping", "{}")], "tool_calls")


# ---- the official client --------------------------------------------------------------------------------------------


def test_openai_client(servers):
    server = servers["thinking"]
    server.engine.says = ids_of(server, f"<think>hm</think>Well.\n{CALL}")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        body = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 500}
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        assert choice.message.reasoning_content == "hm"
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == {"city": 'Öslo "}{"'}
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        assert final.choices[0].finish_reason == "tool_calls"
        history = [
            *HI,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        client.chat.completions.create(**{**body, "messages": history})
        assert CALL in prompt_of(server)
    assert EOS in unpack_ids(server.engine.received[-1].ids)


def test_ids_of_calls_that_mistrals_templates_take(tmp_path):
    with Server(tmp_path, tool_call_parser="mistral") as server:
        server.engine.says = list(b'[TOOL_CALLS] [{"name": "ping", "arguments": {}}]')
        function = {"name": "ping", "parameters": {"type": "object"}}
        asked = {"input": "hi", "tools": [{"type": "function", **function}]}
        ids = [server.ok("/v1/responses", asked)["output"][-1]["call_id"]]
        asked = {"messages": HI, "max_tokens": 99, "tools": [{"name": "ping", "input_schema": {"type": "object"}}]}
        ids.append(server.ok("/v1/messages", asked)["content"][-1]["id"])
        ids.append(server.ok(CHAT, {"messages": HI, "tools": [PING]})["choices"][0]["message"]["tool_calls"][0]["id"])
        assert all(len(one) == 9 and one.isalnum() for one in ids)
