"""instructor, with grammars and with tools: python use_instructor.py BASE_URL"""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Item(BaseModel):
    name: str = Field(max_length=6)
    colour: Literal["red", "blue"]
    price: int = Field(ge=1, le=99)


class Order(BaseModel):
    items: list[Item] = Field(min_length=1, max_length=1)
    paid: bool


MESSAGES = [{"role": "user", "content": "I take two red pens for three each."}]

plain = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
model = plain.models.list().data[0].id
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(plain, mode=mode)
    wishes = {"model": model, "messages": MESSAGES, "temperature": 0.7, "seed": 1, "max_tokens": 200, "max_retries": 0}
    order, raw = client.chat.completions.create_with_completion(response_model=Order, **wishes)
    assert isinstance(order, Order), order
    assert raw.usage.completion_tokens > 0
parts = list(client.chat.completions.create_partial(response_model=Order, **wishes))
assert len(parts) > 1
Order.model_validate(parts[-1].model_dump())
print("ok")
