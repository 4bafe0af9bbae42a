"""Shared, main process: what of JSON Schema can be enforced exactly, keyword by keyword. No torch, no grammar library.

`rewrite` says a schema in keywords that the grammar library enforces: conditions and negations become alternatives, and
what has no such form is refused by name. Rules hold for draft 4 to 2020-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_DEPTH = 48
MAX_PROPERTIES = 1000  # of one object
MAX_BRANCHES = 8  # of a oneOf that must be proved by negation
MAX_EXCLUDED = 64  # texts that a string may not be
MAX_WORK = 50_000  # schemas looked at; references let a small schema be an endless one written out
CHARACTERS_A_WORK = 16

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""That the library enforces."""

FORMAT_PATTERNS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",  # RFC 6901
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
UNENFORCED_FORMATS = ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "regex")
"""Of the standard. Formats that it does not have are annotations."""

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

_UNENFORCED = (
    *("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    *("contains", "disallow", "extends", "divisibleBy"),
)

_ASSERTING = frozenset(
    (
        *(key for keys in _KEYWORDS_OF.values() for key in keys),
        *("type", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", *_UNENFORCED),
    )
)

Schema = Any  # a bool or a dict


class GrammarError(Exception):
    """A constraint that cannot be enforced; the sentence says what to change."""


Searcher = Callable[[str], Callable[[str], bool]]
"""From a pattern to whether it is found in a text; GrammarError if it is none."""


def rewrite(schema: Schema, searcher: Searcher) -> Schema:
    """The same instances, in enforceable keywords. GrammarError names the keyword that has no such form."""
    return _Rewriter(schema, searcher).schema(schema, 0)


class _Rewriter:
    def __init__(self, root: Schema, searcher: Searcher) -> None:
        self._root = root
        self._searcher = searcher
        self._work = 0
        # Before 2019-09 a reference stood for all that is beside it.
        self._only_refs = isinstance(root, dict) and re.search(r"draft-0[3-7]", str(root.get("$schema"))) is not None

    def schema(self, schema: Schema, depth: int) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._count_work()
        if depth > MAX_DEPTH:
            raise GrammarError(f"schemas may be nested {MAX_DEPTH} deep at most")
        if self._only_refs and isinstance(schema.get("$ref"), str):
            kept = ("$ref", "definitions", "$defs", "$schema", "$id", "id")
            schema = {key: value for key, value in schema.items() if key in kept}
        for key in _UNENFORCED:
            if key in schema:
                raise GrammarError(f"`{key}` cannot be enforced")
        schema = self._with_rewritten_parts(schema, depth)
        more = self._format(schema)
        if schema.get("uniqueItems") is False or _integer(schema.get("maxItems")) in (0, 1):
            schema.pop("uniqueItems", None)
        self._count_properties(schema)
        self._name_properties(schema)
        more += [*self._dependencies(schema), *self._conditions(schema), *self._alternatives(schema)]
        if "not" in schema:
            more.append(self.schema(self.negated(schema.pop("not"), depth), depth + 1))
        if more:
            if not isinstance(schema.get("allOf", []), list):
                raise GrammarError("`allOf` must be a list")
            schema["allOf"] = [*schema.get("allOf", []), *more]
        return schema

    def _with_rewritten_parts(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for key, value in schema.items():
            match key, value:
                case (("properties" | "patternProperties" | "definitions" | "$defs" | "dependentSchemas"), dict()):
                    if len(value) > MAX_PROPERTIES:
                        raise GrammarError(f"`{key}` may have {MAX_PROPERTIES} entries at most")
                    parts[key] = {name: self.schema(inner, depth + 1) for name, inner in value.items()}
                case (("allOf" | "anyOf" | "oneOf" | "prefixItems"), list()):
                    parts[key] = [self.schema(inner, depth + 1) for inner in value]
                case "items", list():
                    parts[key] = [self.schema(inner, depth + 1) for inner in value]
                case (("items" | "additionalItems" | "additionalProperties" | "then" | "else"), _):
                    parts[key] = self.schema(value, depth + 1)
                case _:
                    parts[key] = value
        return parts

    def _count_work(self, amount: int = 1) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise GrammarError("it becomes too large with its conditions and alternatives written out")

    # ---- keyword by keyword -----------------------------------------------------------------------------------------

    def _format(self, schema: dict[str, Any]) -> list[Schema]:
        name = schema.get("format")
        if name in FORMATS or not isinstance(name, str):
            return []  # one that is no name is the library's to refuse
        schema.pop("format", None)
        if name in UNENFORCED_FORMATS:
            raise GrammarError(f"the `format` {name} cannot be enforced; leave it out, or say it as a `pattern`")
        return [{"pattern": FORMAT_PATTERNS[name]}] if name in FORMAT_PATTERNS else []

    def _count_properties(self, schema: dict[str, Any]) -> None:
        """Drops bounds that hold anyhow."""
        least, most = _integer(schema.get("minProperties")), _integer(schema.get("maxProperties"))
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if least is not None and least <= len(set(_names(schema.get("required")))):
            del schema["minProperties"]
        if most is not None and closed and len(_dict(schema.get("properties"))) <= most:
            del schema["maxProperties"]

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """A pattern of names says for which of them additional properties are allowed at all."""
        if "propertyNames" not in schema:
            return
        names = self._resolved(schema.pop("propertyNames"))
        if names is True or (isinstance(names, dict) and not _asserting(names)):
            return
        others = schema.get("additionalProperties", True)
        known = _dict(schema.get("properties"))
        if schema.get("patternProperties"):
            raise GrammarError("`propertyNames` beside `patternProperties` cannot be enforced")
        if names is False:
            allowed, rest = (lambda name: False), {}
        elif not isinstance(names, dict):
            raise GrammarError("`propertyNames` must be a schema")
        elif set(_asserting(names)) <= {"type", "pattern"} and names.get("type", "string") == "string":
            pattern = names.get("pattern", "")
            if not isinstance(pattern, str):
                raise GrammarError("a `pattern` must be a text")
            allowed, rest = self._searcher(pattern), {"patternProperties": {pattern: others}}
        elif set(_asserting(names)) <= {"type", "enum"} and isinstance(names.get("enum"), list):
            listed = [name for name in names["enum"] if isinstance(name, str)]
            allowed, rest = set(listed).__contains__, {}
            known = known | {name: others for name in listed if name not in known}
        else:
            raise GrammarError("`propertyNames` can be enforced with `pattern` or `enum` only")
        schema["properties"] = {name: inner if allowed(name) else False for name, inner in known.items()}
        schema |= rest
        schema["additionalProperties"] = False

    def _dependencies(self, schema: dict[str, Any]) -> list[Schema]:
        """Without the property that has them they hold."""
        found = []
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in _dict(schema.pop(key, None)).items():
                if isinstance(wanted, str):
                    wanted = [wanted]
                inner = {"required": wanted} if isinstance(wanted, list) else wanted
                if key == "dependencies":
                    inner = self.schema(inner, 0)
                found.append({"anyOf": [{"properties": {name: False}}, inner]})
        return found

    def _conditions(self, schema: dict[str, Any]) -> list[Schema]:
        condition = schema.pop("if", None)
        then, otherwise = schema.pop("then", True), schema.pop("else", True)
        if condition is None:
            return []
        found = []
        if then is not True:
            found.append({"anyOf": [self.schema(self.negated(condition, 0), 0), then]})
        if otherwise is not True:
            found.append({"anyOf": [self.schema(condition, 0), otherwise]})
        return found

    def _alternatives(self, schema: dict[str, Any]) -> list[Schema]:
        """`oneOf` whose branches exclude each other is `anyOf`; others are made to."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or len(branches) < 2:
            return []
        resolved = [self._resolved(branch) for branch in branches]
        del schema["oneOf"]
        pairs = ((a, b) for i, a in enumerate(resolved) for b in resolved[:i])
        if _list_different(resolved) or all(self._exclude(a, b, schema) for a, b in pairs):
            return [{"anyOf": branches}]
        if len(branches) > MAX_BRANCHES:
            raise GrammarError(f"`oneOf` of more than {MAX_BRANCHES} branches that may hold together")
        exclusive = []
        for i, branch in enumerate(branches):
            others = [self.schema(self.negated(other, 0), 0) for j, other in enumerate(branches) if j != i]
            exclusive.append({"allOf": [branch, *others]})
        return [{"anyOf": exclusive}]

    def _exclude(self, a: Schema, b: Schema, around: Mapping[str, Any]) -> bool:
        """Whether it can be seen that nothing is both."""
        self._count_work()
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        types = [set(_types(side)) for side in (a, b)]
        if not types[0] & types[1]:
            return True
        values = [_values(side) for side in (a, b)]
        if values[0] is not None and values[1] is not None and not set(values[0]) & set(values[1]):
            return True
        if set(_types(around)) & types[0] & types[1] != {"object"}:
            return False
        required = [set(_names(side.get("required"))) | set(_names(around.get("required"))) for side in (a, b)]
        properties = [_dict(side.get("properties")) for side in (a, b)]
        for needed, other, its in ((required[0], b, properties[1]), (required[1], a, properties[0])):
            closed = other.get("additionalProperties") is False and not other.get("patternProperties")
            if closed and needed - set(its):
                return True
        return any(
            self._exclude(self._resolved(properties[0][name]), self._resolved(properties[1][name]), {})
            for name in sorted(required[0] & required[1])
            if name in properties[0] and name in properties[1]
        )

    # ---- negation ---------------------------------------------------------------------------------------------------

    def negated(self, schema: Schema, depth: int) -> Schema:
        """What `schema` refuses, as far as that can be said."""
        if depth > MAX_DEPTH:
            raise GrammarError("`not` of a schema that contains itself cannot be enforced")
        schema = self._resolved(schema)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise GrammarError("a schema must be an object, true or false")
        self._count_work(1 + len(json.dumps(schema)) // CHARACTERS_A_WORK)  # its texts are said again, and longer
        ways: list[Schema] = []  # to break one of the keywords
        for key, value in _asserting(schema).items():
            ways += self._broken(key, value, schema, depth + 1)
        return {"anyOf": ways} if ways else False

    def _broken(self, key: str, value: Any, schema: Mapping[str, Any], depth: int) -> list[Schema]:
        match key, value:
            case "type", (str() | list()):
                others = [name for name in TYPES if name not in _types(schema)]
                names = [value] if isinstance(value, str) else _names(value)
                if "integer" in names and "number" not in names:
                    raise GrammarError("`not` with the type integer cannot be enforced")
                return [{"type": others}] if others else []
            case "enum", list():
                return _other_than(value)
            case "const", _:
                return _other_than([value])
            case "required", list() if len(_names(value)) == len(value):
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties", dict():
                return [
                    {"type": "object", "required": [name], "properties": {name: self.negated(inner, depth)}}
                    for name, inner in value.items()
                ]
            case "anyOf", list():
                return [{"allOf": [self.negated(inner, depth) for inner in value]}]
            case "allOf", list():
                return [self.negated(inner, depth) for inner in value]
            case "not", _:
                return [value]
            case "minLength", int():
                return [{"type": "string", "maxLength": value - 1}] if value > 0 else []
            case "maxLength", int():
                return [{"type": "string", "minLength": value + 1}]
            case "minItems", int():
                return [{"type": "array", "maxItems": value - 1}] if value > 0 else []
            case "maxItems", int():
                return [{"type": "array", "minItems": value + 1}]
            case "minimum", (int() | float()):
                return [{"type": "number", "exclusiveMaximum": value}]
            case "maximum", (int() | float()):
                return [{"type": "number", "exclusiveMinimum": value}]
            case "exclusiveMinimum", (int() | float()) if not isinstance(value, bool):
                return [{"type": "number", "maximum": value}]
            case "exclusiveMaximum", (int() | float()) if not isinstance(value, bool):
                return [{"type": "number", "minimum": value}]
        raise GrammarError(f"`not` of a schema with `{key[:40]}` cannot be enforced")

    def _resolved(self, schema: Schema) -> Schema:
        """A schema that is a reference and nothing else, as what it refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if set(_asserting(schema)) != {"$ref"}:
                raise GrammarError("keywords beside `$ref` cannot be negated")
            schema = self._at(schema["$ref"])
        raise GrammarError("`$ref` refers to itself")

    def _at(self, reference: Any) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GrammarError("`$ref` may only refer to a place in the schema itself, as in `#/$defs/name`")
        place = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and step.isdigit() and int(step) < len(place):
                place = place[int(step)]
            elif isinstance(place, dict) and step in place:
                place = place[step]
            else:
                raise GrammarError(f"`$ref`: there is no {reference[:100]}")
        return place


def _asserting(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without keywords that refuse nothing."""
    return {key: value for key, value in schema.items() if key in _ASSERTING}


def _names(value: Any) -> list[str]:
    """Misshapen values are the library's to refuse."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Of TYPES, those that an instance may have."""
    if "type" not in schema:
        return list(TYPES)
    names = [schema["type"]] if isinstance(schema["type"], str) else _names(schema["type"])
    return [name for name in TYPES if name in names or (name == "number" and "integer" in names)]


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    """Canonical texts of all that an instance may be, if they are listed."""
    if "const" in schema:
        return [_canonical(schema["const"])]
    if isinstance(schema.get("enum"), list):
        return list(map(_canonical, schema["enum"]))
    return None


def _list_different(schemas: Sequence[Schema]) -> bool:
    """Whether each lists its values and no two the same: long menus are written so, with a title for each."""
    lists = [_values(schema) if isinstance(schema, dict) else None for schema in schemas]
    if None in lists:
        return False
    distinct = [set(values) for values in lists]
    return len(set().union(*distinct)) == sum(map(len, distinct))


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _other_than(values: Sequence[Any]) -> list[Schema]:
    """Ways to be none of these texts, booleans and nulls."""
    texts = [value for value in values if isinstance(value, str)]
    ways: list[Schema] = []
    for value in values:
        if not isinstance(value, str | bool | None):
            raise GrammarError("`not` of numbers, lists or objects as values cannot be enforced")
    if len(texts) > MAX_EXCLUDED:
        raise GrammarError(f"`not` of more than {MAX_EXCLUDED} texts")
    ways.append({"type": "string", "pattern": f"^(?:{_not_among(texts)})$"} if texts else {"type": "string"})
    left = [value for value in (True, False) if value not in [v for v in values if isinstance(v, bool)]]
    if left:
        ways.append({"enum": left})
    ways.append(
        {"type": [name for name in ("null", "number", "array", "object") if name != "null" or None not in values]}
    )
    return ways


def _not_among(texts: Sequence[str]) -> str:
    """A pattern of every text but these, by their first characters."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    firsts = "".join(rf"\x{{{ord(char):x}}}" for char in by_first)
    ways = [rf"[^{firsts}](?s:.)*" if firsts else r"(?s:.)+"]
    ways += [rf"\x{{{ord(char):x}}}(?:{_not_among(rests)})" for char, rests in by_first.items()]
    if "" not in texts:
        ways.append("")
    return "|".join(ways)
