"""Anthropic's client: python use_anthropic.py BASE_URL"""

import json
import sys
import urllib.request

import anthropic

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}

name = json.load(urllib.request.urlopen(sys.argv[1] + "/v1/models"))["data"][0]["id"]
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
wishes = {"model": name, "max_tokens": 12, "system": "You are brief.", "extra_body": {"temperature": 0}}

whole = client.messages.create(messages=HELLO, **wishes)
[block] = whole.content
assert block.type == "text"
assert block.text
assert whole.usage.output_tokens > 0
assert whole.stop_reason in ("end_turn", "max_tokens")
with client.messages.stream(messages=HELLO, **wishes) as stream:
    assert "".join(stream.text_stream) == block.text
    assert stream.get_final_message().stop_reason == whole.stop_reason

forced = {"messages": HELLO, "tools": [WEATHER], **(wishes | {"max_tokens": 80})}
forced["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(**forced)
assert called.stop_reason == "tool_use"
call = called.content[-1]
assert call.name == "weather"
assert call.input["city"] in ("Rome", "Oslo")
with client.messages.stream(**forced) as stream:
    assert stream.get_final_message().content[-1].input == call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
turns = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(messages=turns, tools=[WEATHER], **wishes).content

refusal = None
try:
    client.messages.create(messages=HELLO, **(wishes | {"extra_body": {"top_p": 2}}))
except anthropic.BadRequestError as raised:
    refusal = raised
assert refusal is not None, "a top_p of 2 was served"
assert refusal.body["error"]["message"]
print("ok")
