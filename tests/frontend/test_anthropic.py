"""/v1/messages, by Anthropic's own client."""

import json

import anthropic
import pytest
from frontend_harness import EOS, MODEL, Server

pytestmark = pytest.mark.usefixtures("quiet_engine")

TOOL = {
    "name": "weather",
    "description": "Of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": "secret"}
    with Server(tmp_path_factory.mktemp("s"), context_length=4096, pool_tokens=4096, **flags) as running:
        yield running


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="secret", max_retries=0) as made:
        yield made


def said(server, text):
    server.engine.says = list(text.encode())


def test_text(server, client):
    said(server, "Hello!")
    message = client.messages.create(
        model=MODEL, max_tokens=50, messages=HI, system="Be kind.", extra_body={"temperature": 0.5}
    )
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        MODEL,
        "end_turn",
    )
    assert [block.text for block in message.content] == ["Hello!"]
    usage, sampling = message.usage, server.engine.received[-1].sampling
    assert usage.output_tokens == 7
    assert usage.input_tokens + usage.cache_read_input_tokens == len(server.engine.received[-1].ids) // 4
    assert (sampling.temperature, sampling.max_new_tokens) == (0.5, 50)
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_a_stream_adds_up_to_the_message(server, client, tokens_per_step):
    server.engine.tokens_per_step = tokens_per_step
    text = f"<think>\nhm\n</think>\n\nLet me see.{CALL}"
    said(server, text)
    asked = {"model": MODEL, "max_tokens": 500, "messages": HI, "tools": [TOOL]}
    whole = client.messages.create(**asked)
    kinds = []
    with client.messages.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[0].thinking.strip(), whole.content[1].text.strip()) == ("hm", "Let me see.")
    assert (whole.content[2].name, whole.content[2].input) == ("weather", {"town": "Oslo"})
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    for one, other in zip(whole.content, streamed.content, strict=True):
        assert one.model_dump(exclude={"id"}, exclude_none=True) == other.model_dump(
            exclude={"id", "parsed_output"}, exclude_none=True
        )
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_what_was_called_is_said_in_the_next_turn(server, client):
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]}]
    messages += [{"role": "user", "content": [result, {"type": "text", "text": "and now?"}]}]
    said(server, "Rain.")
    client.messages.create(model=MODEL, max_tokens=50, messages=messages, tools=[TOOL])
    prompt = server.tokenizer.decode(list(memoryview(server.engine.received[-1].ids).cast("i")), False)
    for part in ("Let me see.", '"town": "Oslo"', "rain", "and now?"):
        assert part in prompt


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "none"}, False)],
)  # fmt: skip
def test_choices_of_tools(server, client, choice, forced):
    said(server, '[{"name": "weather", "parameters": {"town": "Oslo"}}]' if forced else "No.")
    message = client.messages.create(
        model=MODEL, max_tokens=500, messages=HI, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"}
    )
    assert (server.engine.received[-1].grammar is not None) == forced
    assert message.stop_reason in ("tool_use", "end_turn")


def test_ends(server, client):
    said(server, "one STOP two")
    message = client.messages.create(model=MODEL, max_tokens=50, messages=HI, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one "
    message = client.messages.create(model=MODEL, max_tokens=2, messages=HI)
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "on")


def test_an_answer_that_was_begun(server, client):
    said(server, "deed")
    client.messages.create(model=MODEL, max_tokens=9, messages=[*HI, {"role": "assistant", "content": "In"}])
    assert bytes(memoryview(server.engine.received[-1].ids).cast("i").tolist()[-2:]) == b"In"
    assert EOS not in memoryview(server.engine.received[-1].ids).cast("i").tolist()[-3:]


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_message_in_the_place_of_the_answer(server, client, content):
    for messages in (HI, [*HI, {"role": "assistant", "content": content}]):
        client.messages.create(model=MODEL, max_tokens=1, messages=messages)
    without, with_it = server.engine.received
    assert with_it.ids == without.ids


@pytest.mark.parametrize(
    ("body", "mentions"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "role"),
        ({"messages": []}, "messages"),
        ({"messages": [], "system": "Be kind."}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"nonsense": 1}, "nonsense"),
        ({"stop_sequences": [""]}, "`stop_sequences` takes"),
        ({"tools": [{"name": "a b"}]}, r"`tools\[0\]`: its `name` must be 1 to 128"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "its `input_schema` must be"),
    ],
)
def test_refusals(server, client, body, mentions):
    asked = {"model": MODEL, "max_tokens": 5, "messages": HI, **body}
    with pytest.raises(anthropic.BadRequestError, match=mentions) as caught:
        client.post("/v1/messages", body=asked, cast_to=object)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    if "tools" in body:
        with pytest.raises(anthropic.BadRequestError, match=mentions):
            client.post("/v1/messages/count_tokens", body={"messages": HI, **body}, cast_to=object)


def test_other_errors(server, client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=HI)
    server.engine.fail_status = 500
    server.engine.fail_after = 2
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream,
    ):
        for _ in stream:
            pass


def test_each_event_has_its_name(server):
    body = {"model": MODEL, "max_tokens": 3, "messages": HI, "stream": True}
    _, _, raw = server.request("POST", "/v1/messages", body, {"x-api-key": "secret"})
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
