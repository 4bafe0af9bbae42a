"""A constraint holds whatever else is asked for, beside whatever else runs."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from server_harness import Server, at_once

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 3, "maximum": 112},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Describe somebody."}]


def generate(server: Server, **sampling: Any) -> dict[str, Any]:
    return server.ask("/generate", text="A:", sampling_params={"max_new_tokens": 200, **sampling})


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3},
        {"temperature": 1.0, "top_p": 0.5, "seed": 4},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "seed": 5},
        {"logit_bias": {"0": 100, "2": 100, "28": 100}, "seed": 6},
        {"extra_body": {"min_tokens": 150}, "seed": 7},
        {"extra_body": {"ignore_eos": True, "top_k": 5, "min_p": 0.1}, "seed": 8},
    ],
)
def test_answers_are_valid_whatever_else_is_wished(server: Server, wishes: dict[str, Any]) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="",
        messages=MESSAGES,
        response_format=FORMAT,
        n=2,
        logprobs=True,
        top_logprobs=2,
        max_tokens=300,
        **wishes,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)


def test_a_stream_says_the_same(server: Server) -> None:
    body = {"messages": MESSAGES, "response_format": FORMAT, "temperature": 1.0, "seed": 11, "max_tokens": 300}
    whole = server.ask("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    with server.stream("/v1/chat/completions", **body) as stream:
        parts = [event["choices"][0]["delta"].get("content") or "" for event in stream]
    assert "".join(parts) == whole


def test_rows_beside_each_other_have_constraints_of_their_own(server: Server) -> None:
    patterns = [None, "[0-9]{4}", None, "(yes|no), (yes|no)", "x{9}", None]
    samplings = [{} if pattern is None else {"regex": pattern} for pattern in patterns]
    texts = [
        answer["text"]
        for answer in at_once(
            [lambda s=s: generate(server, **s, temperature=1.0, max_new_tokens=16, ignore_eos=True) for s in samplings]
        )
    ]
    for pattern, text in zip(patterns, texts, strict=True):
        assert pattern is None or re.fullmatch(pattern, text)


def test_where_it_ends_and_where_it_is_cut(server: Server) -> None:
    ended = generate(server, regex="yes", ignore_eos=True)
    assert ended["text"] == "yes"
    assert ended["meta_info"]["finish_reason"]["type"] == "stop"
    cut = generate(server, json_schema=json.dumps(SCHEMA), max_new_tokens=3)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert cut["text"].startswith("{")


def test_a_schema_that_only_its_compiler_finds_empty_is_refused(server: Server) -> None:
    for stream in (False, True):
        schema = {"anyOf": [{"$ref": "#"}]}
        body = {"text": "A:", "sampling_params": {"json_schema": json.dumps(schema)}, "stream": stream}
        assert server.post("/generate", body).status == 400


def test_what_is_forced_is_drafted_from_its_first_token_on(server: Server) -> None:
    """A step that had been planned before its grammar was looked at would compute that one alone."""
    before = drafted(server)
    answer = generate(server, regex="[XY] quick brown foxes jump over lazy dogs")
    assert drafted(server) - before == answer["meta_info"]["completion_tokens"] - 1 > 5


def drafted(server: Server) -> int:
    metrics = server.get("/metrics").body.decode()
    return int(float(re.search(r"^lockstep:drafted_tokens_total\S* (\S+)$", metrics, re.MULTILINE)[1]))
