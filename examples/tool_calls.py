"""A chat in which the model calls functions of ours: calls forced and streamed, run here, and their results sent back.

python -m examples.tool_calls [--base-url http://127.0.0.1:30000/v1] [--question "..."]
"""

from __future__ import annotations

import argparse
import json

from openai import OpenAI

from examples.host import need_server

CITIES = {"Lima": 19, "Oslo": 4, "Paris": 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the temperature in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": sorted(CITIES)},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    degrees = CITIES[city]
    return f"{degrees} °C" if unit == "celsius" else f"{degrees * 9 / 5 + 32:.0f} °F"


def streamed_calls(client: OpenAI, model: str, messages: list[dict]) -> list[dict]:
    """The calls of one answer, put together from the pieces in which they come."""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
        stream=True,
    )
    calls: list[dict] = []
    for chunk in stream:
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.index == len(calls):
                calls.append(
                    {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
                )
                print(f"\n{piece.function.name} ", end="")
            calls[piece.index]["function"]["arguments"] += piece.function.arguments
            print(piece.function.arguments, end="", flush=True)
        if chunk.choices[0].finish_reason is not None:
            print(f"  [{chunk.choices[0].finish_reason}]")
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--question", default="How warm is it in Oslo, in celsius?")
    options = parser.parse_args()

    need_server(options.base_url)
    client = OpenAI(base_url=options.base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[dict] = [{"role": "user", "content": options.question}]
    calls = streamed_calls(client, model, messages)
    messages.append({"role": "assistant", "tool_calls": calls})
    for call in calls:
        result = get_weather(**json.loads(call["function"]["arguments"]))
        print("→", result)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=60
    )
    print(answer.choices[0].message.content)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    print(f"[{cached} of {answer.usage.prompt_tokens} prompt tokens were cached]")


if __name__ == "__main__":
    main()
