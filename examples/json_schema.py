"""Answers that are always a `Recipe`, with OpenAI's client: whole, and streamed.

    python -m launch &
    python -m examples.json_schema [--base-url http://127.0.0.1:30000/v1]

Needs `pip install openai pydantic`.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from examples.host import need_server

Text = Annotated[str, Field(max_length=60)]


class Closed(BaseModel):
    """With no properties but its own: else the model may make up others, and need not come to an end."""

    model_config = ConfigDict(extra="forbid")


class Ingredient(Closed):
    name: Text
    grams: Annotated[int, Field(ge=1, le=2000)]


class Recipe(Closed):
    title: Text
    difficulty: Literal["easy", "medium", "hard"]
    ingredients: Annotated[list[Ingredient], Field(min_length=1, max_length=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    base_url = parser.parse_args().base_url
    need_server(base_url)
    client = OpenAI(base_url=base_url, api_key="none")
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "A recipe for pancakes."}],
        "temperature": 0,
        "max_tokens": 500,
    }

    parsed = client.chat.completions.parse(**asked, response_format=Recipe)
    recipe = parsed.choices[0].message.parsed
    print(f"{recipe.title} ({recipe.difficulty}): {', '.join(one.name for one in recipe.ingredients)}")

    schema = {"type": "json_schema", "json_schema": {"name": "recipe", "schema": Recipe.model_json_schema()}}
    text = ""
    stream = client.chat.completions.create(**asked, response_format=schema, stream=True)
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        text += piece
    print()
    print(Recipe.model_validate_json(text).title)


if __name__ == "__main__":
    main()
