"""litellm, as a library: python use_litellm.py BASE_URL"""

import asyncio
import json
import os
import sys
from typing import Literal

import httpx
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it would ask for prices in the internet
import litellm


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[20, 30]


base_url = sys.argv[1] + "/v1"
name = httpx.get(base_url + "/models").json()["data"][0]["id"]
wishes = {"api_base": base_url, "api_key": "none", "temperature": 0, "max_tokens": 20, "num_retries": 0}
chat = {"model": f"openai/{name}", "messages": [{"role": "user", "content": "Say hello."}], **wishes}

whole = litellm.completion(**chat)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens > 0
chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **chat))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
assert asyncio.run(litellm.acompletion(**chat)).choices[0].message.content == text

answer = litellm.completion(response_format=Person, **(chat | {"max_tokens": 60}))
Person.model_validate_json(answer.choices[0].message.content)

parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
answer = litellm.completion(tools=tools, tool_choice="required", **(chat | {"max_tokens": 60}))
call = answer.choices[0].message.tool_calls[0]
assert call.function.name == "weather"
assert json.loads(call.function.arguments)["city"] == "Rome"

completion = litellm.text_completion(model=f"text-completion-openai/{name}", prompt="One, two,", **wishes)
assert completion.choices[0].text
try:
    litellm.completion(**(chat | {"top_p": 2}))
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("a top_p of 2 was served")
print("ok")
