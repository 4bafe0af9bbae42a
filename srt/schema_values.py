"""Shared, frontend: what can be seen of JSON Schema's values and schemas without a grammar.

`Comparison` says whether a value is an instance and whether two schemas exclude each other, or that it cannot be seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")

_KEYWORDS_OF = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    ),
}

_NAMED = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas")
"""Keywords whose values are schemas by name."""

UNENFORCED = (
    *("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    *("contains", "disallow", "extends", "divisibleBy"),
)

_ASSERTING = frozenset(
    (
        *(key for keys in _KEYWORDS_OF.values() for key in keys),
        *("type", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", *UNENFORCED),
    )
)

VALUES_A_WORK = 4

Schema = Any  # a bool or a dict


class Comparison:
    """`resolve` gives what a schema refers to; `count_work` bounds what a client can cause."""

    def __init__(self, resolve: Callable[[Schema], Schema], count_work: Callable[..., None]) -> None:
        self._resolve = resolve
        self._count_work = count_work

    def exclude(self, a: Schema, b: Schema, around: Mapping[str, Any]) -> bool:
        """Whether it can be seen that nothing of `around` is both."""
        self._count_work()
        a, b = self._resolve(a), self._resolve(b)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        common = set(types_of(a)) & set(types_of(b)) & set(types_of(around))
        if not common:
            return True
        if list_different((a, b)):
            return True
        for one, other in ((a, b), (b, a)):
            listed = listed_in(one)
            if listed is not None and all(self.fits(value, other) is False for value in listed):
                return True
        if common == {"array"}:
            return self._exclude_arrays(a, b)
        return common == {"object"} and self._exclude_objects(a, b, around)

    def _exclude_arrays(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        least = max(integer(side.get("minItems")) or 0 for side in (a, b))
        most = [size for side in (a, b) if (size := integer(side.get("maxItems"))) is not None]
        if most and least > min(most):
            return True
        items = [side["items"] for side in (a, b) if isinstance(side.get("items"), dict) and "prefixItems" not in side]
        return least > 0 and len(items) == 2 and self.exclude(*items, {})

    def _exclude_objects(self, a: Mapping[str, Any], b: Mapping[str, Any], around: Mapping[str, Any]) -> bool:
        always = set(names_in(around.get("required")))
        required = [set(names_in(side.get("required"))) | always for side in (a, b)]
        properties = [as_dict(side.get("properties")) for side in (a, b)]
        for needed, other, its in ((required[0], b, properties[1]), (required[1], a, properties[0])):
            closed = other.get("additionalProperties") is False and not other.get("patternProperties")
            if closed and needed - set(its):
                return True
        return any(
            self.exclude(properties[0][name], properties[1][name], {})
            for name in sorted(required[0] | required[1])
            if name in properties[0] and name in properties[1]
        )

    def fits(self, value: Any, schema: Schema) -> bool | None:
        """Whether `value` is an instance; None if these keywords do not tell."""
        self._count_work()
        schema = self._resolve(schema)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return None
        return _all([self._obeys(value, key, inner, schema) for key, inner in asserting(schema).items()])

    def _obeys(self, value: Any, key: str, inner: Any, schema: Mapping[str, Any]) -> bool | None:
        match key, inner:
            case "type", (str() | list()):
                wanted = [inner] if isinstance(inner, str) else inner
                return type_of(value) in wanted or ("integer" in wanted and _is_whole(value))
            case "enum", list():
                self._count_work(1 + len(inner) // VALUES_A_WORK)
                return canonical(value) in map(canonical, inner)
            case "const", _:
                return canonical(value) == canonical(inner)
            case "not", _:
                fits = self.fits(value, inner)
                return None if fits is None else not fits
            case "allOf", list():
                return _all([self.fits(value, one) for one in inner])
            case "anyOf", list():
                refused = _all([None if (fits := self.fits(value, one)) is None else not fits for one in inner])
                return None if refused is None else not refused
            case "items", dict() if "prefixItems" not in schema:
                return _all([self.fits(item, inner) for item in value]) if isinstance(value, list) else True
            case "required", list():
                return not isinstance(value, dict) or all(name in value for name in names_in(inner))
            case "properties", dict():
                if not isinstance(value, dict):
                    return True
                return _all([self.fits(value[name], one) for name, one in inner.items() if name in value])
        kinds = [kind for kind, keys in _KEYWORDS_OF.items() if key in keys]
        return True if kinds and type_of(value) not in kinds else None


def _all(answers: Sequence[bool | None]) -> bool | None:
    if False in answers:
        return False
    return None if None in answers else True


def _is_whole(value: Any) -> bool:
    return type_of(value) == "number" and value == value // 1


def type_of(value: Any) -> str:
    """One of TYPES."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def asserting(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without keywords that refuse nothing."""
    return {key: value for key, value in schema.items() if key in _ASSERTING}


def names_in(value: Any) -> list[str]:
    """Misshapen values are the library's to refuse."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Of TYPES, those that an instance may have."""
    if "type" not in schema:
        return list(TYPES)
    names = [schema["type"]] if isinstance(schema["type"], str) else names_in(schema["type"])
    return [name for name in TYPES if name in names or (name == "number" and "integer" in names)]


def patterns_together(root: Schema) -> int:
    """How many patterns and formats one string must match, where they are most."""
    most = 0
    found: dict[str, int] = {}  # by reference

    def at(schema: Any) -> int:
        nonlocal most
        if isinstance(schema, list):
            return max(map(at, schema), default=0)
        if not isinstance(schema, dict):
            return 0
        count = ("pattern" in schema) + ("format" in schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in found:
                found[reference] = 0  # where it refers to itself
                found[reference] = at(pointed_at(root, reference))
            count += found[reference]
        for key, inner in schema.items():
            if key == "allOf" and isinstance(inner, list):
                count += sum(map(at, inner))
            elif key in ("anyOf", "oneOf"):
                count += at(inner)
            elif isinstance(inner, dict | list):
                at(list(inner.values()) if key in _NAMED and isinstance(inner, dict) else inner)
        most = max(most, count)
        return count

    at(root)
    return most


def pointed_at(root: Schema, reference: str) -> Schema:
    """What a reference within the schema (RFC 6901, behind a #) refers to; None if there is nothing."""
    place = root
    for step in reference.split("/")[1:]:
        step = unescaped(step)
        if isinstance(place, list) and step.isdigit() and int(step) < len(place):
            place = place[int(step)]
        elif isinstance(place, dict) and step in place:
            place = place[step]
        else:
            return None
    return place


def unescaped(step: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return step.replace("~1", "/").replace("~0", "~")


def takes_all(kind: str, schema: Schema) -> bool:
    """Whether it is plain that a schema refuses no value of this type."""
    if not isinstance(schema, dict):
        return schema is True
    harmless = {"type", *(key for other, keys in _KEYWORDS_OF.items() if other != kind for key in keys)}
    wanted = schema.get("type", kind)
    return kind in (names_in(wanted) if isinstance(wanted, list) else [wanted]) and set(asserting(schema)) <= harmless


def listed_in(schema: Mapping[str, Any]) -> list[Any] | None:
    """All that an instance may be, if it is listed."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def list_different(schemas: Sequence[Schema]) -> bool:
    """Whether each lists its values and no two the same: long menus are written so, with a title for each."""
    lists = [listed_in(schema) if isinstance(schema, dict) else None for schema in schemas]
    if None in lists:
        return False
    distinct = [set(map(canonical, values)) for values in lists]
    return len(set().union(*distinct)) == sum(map(len, distinct))


def canonical(value: Any) -> str:
    """The same text for equal values: 1.0 is 1."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(item) for item in value]
        case dict():
            return {key: _with_integers(item) for key, item in value.items()}
    return value


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
