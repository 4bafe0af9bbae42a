"""/v1/responses and /v1/embeddings, by OpenAI's own client."""

import time

import openai
import pytest
from frontend_harness import MODEL, Server
from pydantic import BaseModel

from srt.frontend import streaming
from srt.frontend.openai import responses
from srt.frontend.openai.responses import Store, Stored, input_messages
from srt.frontend.openai.responses_protocol import Item

pytestmark = pytest.mark.usefixtures("quiet_engine")

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": "one,two"}
    flags |= {"cache_isolation": "api-key"}
    with Server(tmp_path_factory.mktemp("s"), context_length=4096, pool_tokens=4096, **flags) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="one", max_retries=0) as made:
        yield made


def said(server, text):
    server.engine.says = list(text.encode())


def prompt(server):
    return server.tokenizer.decode(list(memoryview(server.engine.received[-1].ids).cast("i")), False)


def test_text(server, client):
    said(server, "Hello!")
    response = client.responses.create(model=MODEL, input="hi", instructions="Be kind.", max_output_tokens=50)
    assert (response.status, response.output_text) == ("completed", "Hello!")
    assert response.usage.output_tokens == 7
    assert response.usage.total_tokens == 7 + len(server.engine.received[-1].ids) // 4
    assert prompt(server).index("Be kind.") < prompt(server).index("hi")
    assert client.responses.retrieve(response.id) == response


def test_how_tokens_are_chosen(server, client):
    more = {"seed": 7, "logit_bias": {"5": -3}, "stop_token_ids": [9], "ignore_eos": True}
    client.responses.create(model=MODEL, input="hi", temperature=0.5, extra_body=more, max_output_tokens=2)
    sampling = server.engine.received[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.logit_bias) == (0.5, 7, ((5, -3.0),))
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9,), True)


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_a_stream_adds_up_to_the_response(server, client, tokens_per_step):
    server.engine.tokens_per_step = tokens_per_step
    said(server, f"<think>\nhm\n</think>\n\nLet me see.{CALL}")
    asked = {"model": MODEL, "input": "hi", "tools": [TOOL], "max_output_tokens": 500}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (whole.output[2].name, whole.output[2].arguments) == ("weather", '{"town": "Oslo"}')
    texts, kinds, numbers = {}, [], []
    with client.responses.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        streamed = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert numbers == list(range(len(numbers)))
    shown = [whole.output[0].content[0].text, whole.output_text, whole.output[2].arguments]
    assert list(texts.values()) == shown
    for one, other in zip(whole.output, streamed.output, strict=True):
        hidden = {"id", "call_id", "parsed_arguments", "content"}
        assert one.model_dump(exclude=hidden) == other.model_dump(exclude=hidden)
    assert streamed.output_text == whole.output_text
    assert client.responses.retrieve(streamed.id).output_text == whole.output_text


def test_log_probabilities_are_all_there_also_of_text_that_came_late(server, client):
    said(server, "Grüße<tool_coll>")  # half a character is not shown, nor what may begin a call
    asked = {"model": MODEL, "input": "hi", "tools": [TOOL], "top_logprobs": 1, "max_output_tokens": 50}
    whole = client.responses.create(**asked).output[-1].content[0]
    events = list(client.responses.create(**asked, stream=True))
    streamed = events[-1].response.output[-1].content[0]
    assert (streamed.text, streamed.logprobs) == (whole.text, whole.logprobs)
    assert len(whole.logprobs) == len("Grüße<tool_coll>".encode()) + 1


def test_what_is_cut_off_says_so_in_every_event(client):
    events = list(client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True))
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]


def test_a_chat_goes_on(server, client):
    said(server, f"Let me see.{CALL}")
    first = client.responses.create(model=MODEL, input="Is it wet?", instructions="Be kind.", tools=[TOOL])
    said(server, "It rains.")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    second = client.responses.create(model=MODEL, input=[result], tools=[TOOL], previous_response_id=first.id)
    told = prompt(server)
    assert "Be kind." not in told  # instructions are one turn's
    assert told.index("Is it wet?") < told.index("Let me see.") < told.index('"town": "Oslo"') < told.index("rain")
    client.responses.create(model=MODEL, input="Sure?", previous_response_id=second.id, store=False)
    again = prompt(server)
    assert again.index("rain") < again.index("It rains.") < again.index("Sure?")
    by_hand = [{"role": "user", "content": "Is it wet?"}, *first.output, result, *second.output]
    client.responses.create(model=MODEL, input=[*by_hand, {"role": "user", "content": "Sure?"}], tools=None)
    assert prompt(server) == again


def test_what_is_not_stored(server, client):
    said(server, "Hello!")
    response = client.responses.create(model=MODEL, input="hi", store=False)
    for missing in (response.id, "resp_nonsense"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
    stored = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="two").responses.retrieve(stored.id)
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="hi", previous_response_id=stored.id)


def test_in_the_background(server, client):
    server.engine.hold_at = 3
    said(server, "Hello!")
    response = client.responses.create(model=MODEL, input="hi", background=True)
    assert (response.status, response.output) == ("in_progress", [])
    with pytest.raises(openai.BadRequestError, match="not complete"):
        client.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
    server.engine.hold_at = 10**9
    server.wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
    assert client.responses.retrieve(response.id).output_text == "Hello!"


def test_cancel(server, client):
    server.engine.hold_at = 3
    said(server, "Hello!")
    response = client.responses.create(model=MODEL, input="hi", background=True)
    server.wait_for(lambda: server.engine.live)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    assert not server.engine.live
    server.engine.reset()
    done = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(done.id)


def test_a_response_that_is_deleted_before_its_end_does_not_come_back(server, client):
    server.engine.hold_at = 3
    said(server, "Hello!")
    response = client.responses.create(model=MODEL, input="hi", background=True)
    server.wait_for(lambda: server.engine.live)
    client.responses.delete(response.id)
    server.wait_for(lambda: not server.services.manager.live)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_ends(server, client):
    said(server, "Hello!")
    cut = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "He")
    events = list(client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    server.engine.fail_status, server.engine.fail_after = 500, 2
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "out of luck"


def test_an_error_comes_behind_what_waited(server, client, monkeypatch):
    monkeypatch.setattr(streaming, "SOFT_LIMIT", -1)
    said(server, "Hello!")
    server.engine.fail_status, server.engine.fail_after = 500, 4
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    assert events[-1].response.output_text == "Hell"


def test_a_schema(server, client):
    class Town(BaseModel):
        name: str

    said(server, '{"name": "Oslo"}')
    response = client.responses.parse(model=MODEL, input="hi", text_format=Town, max_output_tokens=50)
    assert response.output_parsed == Town(name="Oslo")
    assert server.engine.received[-1].grammar is not None


@pytest.mark.parametrize(
    ("body", "mentions"),
    [
        ({"input": []}, "`input` must not be empty"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "function_call"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True, "stream": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "alien", "content": "a"}]}, r"`input\[1\].role`"),
        ({"max_output_tokens": 0}, "`max_output_tokens` must"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": 1}}}}, "`text.format`: a schema must"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, r'"function", "name": …'),
        ({"tools": [{"type": "function"}]}, r"`tools\[0\]`: its `name` must be"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusals(client, body, mentions):
    with pytest.raises(openai.BadRequestError, match=mentions):
        client.post("/responses", body={"model": MODEL, "input": "hi", **body}, cast_to=object)


def test_a_long_turn_is_put_together_in_linear_time():
    calls = [Item("function_call", call_id="c", name="f"), Item("message", role="assistant", content="x")] * 40_000
    began = time.process_time()
    (turn,) = input_messages(calls)
    assert time.process_time() - began < 5
    assert (len(turn.tool_calls), len(turn.content)) == (40_000, 79_999)


def test_embeddings_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model=MODEL, input="hi")


def test_the_store_is_bounded(monkeypatch):
    monkeypatch.setattr(responses, "MAX_STORED", 3)
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 1000)
    store = Store()
    for index in range(5):
        store.put(Stored(b"", {"id": str(index)}, []))
    assert [store.get(str(index), b"").body["id"] for index in (2, 3, 4)] == ["2", "3", "4"]
    store.put(Stored(b"", {"id": "large", "text": "x" * 970}, []))
    with pytest.raises(responses.RequestError):
        store.get("4", b"")
    assert store.get("large", b"")
