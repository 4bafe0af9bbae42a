"""OpenAI's client, as its documentation uses it: python use_openai.py BASE_URL"""

import asyncio
import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[20, 30]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HELLO = [{"role": "user", "content": "Say hello."}]

options = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}
client = openai.OpenAI(**options)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
wishes = {"model": model, "temperature": 0, "max_tokens": 6}

# ---- whole and streamed, sync and async
whole = client.chat.completions.create(messages=HELLO, **wishes)
text = whole.choices[0].message.content
assert text
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
chunks = list(
    client.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **wishes)
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage == whole.usage.model_copy(
    update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
)


async def many() -> None:
    async with openai.AsyncOpenAI(**options) as asynchronous:
        answers = await asyncio.gather(
            *(asynchronous.chat.completions.create(messages=HELLO, **wishes) for _ in range(3))
        )
        assert {answer.choices[0].message.content for answer in answers} == {text}
        stream = await asynchronous.chat.completions.create(messages=HELLO, stream=True, **wishes)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


asyncio.run(many())

# ---- answers of a given form
parsed = client.chat.completions.parse(messages=HELLO, response_format=Person, model=model, temperature=1.5, seed=1)
person = parsed.choices[0].message.parsed
assert isinstance(person, Person)
with client.chat.completions.stream(
    messages=HELLO, response_format=Person, model=model, temperature=1.5, seed=1
) as events:
    kinds = [event.type for event in events]
    assert events.get_final_completion().choices[0].message.parsed == person
assert "content.delta" in kinds
assert "content.done" in kinds

# ---- tools
forced = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
called = client.chat.completions.create(**forced, **(wishes | {"max_tokens": 50}))
assert called.choices[0].finish_reason == "tool_calls"
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather"
assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
with client.chat.completions.stream(**forced, **(wishes | {"max_tokens": 50})) as events:
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
assert [event.arguments for event in done] == [call.function.arguments]
turns = [*HELLO, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
assert client.chat.completions.create(messages=turns, tools=[WEATHER], **wishes).choices[0].message.content

# ---- completions, log-probabilities
completion = client.completions.create(prompt=["One, two,", "A, B,"], logprobs=2, n=2, **wishes)
assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
assert all("".join(choice.logprobs.tokens) == choice.text for choice in completion.choices)
rated = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **wishes)
assert all(len(token.top_logprobs) == 3 for token in rated.choices[0].logprobs.content)

# ---- errors
for wrong, error in (({"top_p": 2}, openai.BadRequestError), ({"model": "no-such"}, openai.NotFoundError)):
    refusal = None
    try:
        client.chat.completions.create(messages=HELLO, **(wishes | wrong))
    except error as raised:
        refusal = raised
    assert refusal is not None, f"{wrong} was served"
    assert refusal.body["message"]
print("ok")
