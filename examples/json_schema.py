"""Answers that are always a `Recipe`, with OpenAI's client: whole, and streamed.

    python -m launch &
    python examples/json_schema.py [--base-url http://127.0.0.1:30000/v1]

Needs `pip install openai pydantic`.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

Text = Annotated[str, Field(max_length=60)]


class Ingredient(BaseModel):
    name: Text
    grams: Annotated[int, Field(ge=1, le=2000)]


class Recipe(BaseModel):
    title: Text
    difficulty: Literal["easy", "medium", "hard"]
    ingredients: Annotated[list[Ingredient], Field(min_length=1, max_length=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    client = OpenAI(base_url=parser.parse_args().base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "A recipe for pancakes."}]

    parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Recipe, temperature=0)
    recipe = parsed.choices[0].message.parsed
    print(f"{recipe.title} ({recipe.difficulty}): {', '.join(one.name for one in recipe.ingredients)}")

    schema = {"type": "json_schema", "json_schema": {"name": "recipe", "schema": Recipe.model_json_schema()}}
    text = ""
    stream = client.chat.completions.create(model=model, messages=messages, response_format=schema, stream=True)
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        text += piece
    print()
    print(Recipe.model_validate_json(text).title)


if __name__ == "__main__":
    main()
