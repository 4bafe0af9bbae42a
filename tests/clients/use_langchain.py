"""langchain-openai, with structured output and tools: python use_langchain.py BASE_URL"""

import sys
from typing import Literal

import httpx
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ann", "Bob"]
    age: int


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


base_url = sys.argv[1] + "/v1"
model = httpx.get(base_url + "/models").json()["data"][0]["id"]
options = {"base_url": base_url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(max_tokens=40, **options)

whole = chat.invoke("Say hello.")
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content
assert [answer.content for answer in chat.batch(["Say hello."] * 3)] == [whole.content] * 3
assert OpenAI(max_tokens=5, **options).invoke("One, two,")

for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Person, method=method).invoke("Who are you?"), Person)

callers = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
question = HumanMessage("How is the weather in Rome?")
called = callers.invoke([question])
[call] = called.tool_calls
assert call["name"] == "weather"
assert call["args"]["city"] in ("Rome", "Oslo")
gathered = None
for chunk in callers.stream([question]):
    gathered = chunk if gathered is None else gathered + chunk
assert [(each["name"], each["args"]) for each in gathered.tool_calls] == [(call["name"], call["args"])]
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
assert chat.bind_tools([weather], tool_choice="none").invoke([question, called, result]).content
print("ok")
