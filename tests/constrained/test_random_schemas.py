"""Random schemas of the keywords that are rewritten: refused, or exactly what `jsonschema` says."""

import json
import random

import jsonschema
import pytest
from walk import CHECK, accepts

from srt.frontend.constraints import Form
from srt.schema_rules import GrammarError

INSTANCES = [
    *("a", "b", 1, 2, 3, -1, 2.5, 0.25, None, True, [], [1], ["a"], [1, "a"], {}, {"a": 1}, {"b": "a"}, {"a": [1]}),
    *({"a": "a", "b": 1}, {"a": 1, "b": 2}, {"a": None, "c": 1}),
]
LEAVES = [
    *({}, True, {"type": "string"}, {"type": "integer"}, {"type": "object"}, {"type": "array"}, {"type": "null"}),
    *({"enum": ["a", 1, None]}, {"enum": ["b", True, 2]}, {"enum": [["a"], [1.0], {"a": 1.0}]}, {"const": {"a": 1}}),
    *({"minimum": 1}, {"multipleOf": 0.25}, {"multipleOf": 1.25}, {"required": ["a"]}, {"$ref": "#/$defs/x"}),
    *({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 1, "items": {"type": "string"}}),
]
AROUND = [{}, {"type": "object"}, {"type": ["string", "object"]}, {"required": ["a"]}]


def schema(rnd, depth):
    kind = rnd.choice(("leaf", "oneOf", "oneOf", "not", "anyOf", "allOf", "dependent", "object", "object"))
    if depth == 0 or kind == "leaf":
        return rnd.choice(LEAVES)
    if kind == "not":
        return {"not": schema(rnd, depth - 1), **rnd.choice(AROUND)}
    if kind == "dependent":
        return {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": schema(rnd, depth - 1)}}
    if kind == "object":
        properties = {name: schema(rnd, depth - 1) for name in rnd.sample("ab", rnd.randint(1, 2))}
        closed = rnd.choice(({}, {"additionalProperties": False}))
        return {"properties": properties, "required": rnd.sample("ab", rnd.randint(0, 2)), **closed}
    return {kind: [schema(rnd, depth - 1) for _ in range(rnd.randint(2, 3))], **rnd.choice(AROUND)}


def is_accepted(grammar, instance):
    """In some order of its properties."""
    orders = [instance, dict(reversed(instance.items()))] if isinstance(instance, dict) else [instance]
    return any(accepts(grammar, json.dumps(one, separators=(",", ":")).encode()) for one in orders)


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.slow)])
def test_what_is_not_refused_is_exact(count):
    rnd, judged = random.Random(count), 0
    for _ in range(count):
        written = {"allOf": [schema(rnd, 3)], "$defs": {"x": rnd.choice(LEAVES[:-3]), "unused": schema(rnd, 1)}}
        try:
            grammar = CHECK(Form("json_schema", written, "x"))
        except GrammarError:
            continue
        judge = jsonschema.Draft202012Validator(written)
        for instance in INSTANCES:
            assert is_accepted(grammar, instance) == judge.is_valid(instance), (written, instance)
        judged += 1
    assert judged > count / 4
