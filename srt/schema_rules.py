"""Shared, frontend: what of JSON Schema can be enforced exactly, keyword by keyword. No torch, no grammar library.

`rewrite` says a schema in keywords that the grammar library enforces: conditions and negations become alternatives, and
what has no such form is refused by name. Rules hold for draft 4 to 2020-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from srt.schema_values import (
    TYPES,
    UNENFORCED,
    Comparison,
    Schema,
    as_dict,
    asserting,
    integer,
    list_different,
    listed_in,
    names_in,
    patterns_together,
    pointed_at,
    takes_all,
    types_of,
    unescaped,
)

MAX_DEPTH = 48
MAX_PROPERTIES = 1000  # of one object
MAX_PATTERN_PROPERTIES = 100  # of one object: the library compares any two
MAX_PATTERNS = 12  # of one string: their intersection may take the library time exponential in them
MAX_BRANCHES = 8  # of a oneOf that must be proved by negation
MAX_EXCLUDED = 64  # texts that a string may not be
MAX_WORK = 50_000  # schemas looked at; references let a small schema be an endless one written out
CHARACTERS_A_WORK = 16
MAX_DECIMALS = 8  # of a number that others are multiples of

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""That the library enforces."""


def _uri_reference() -> str:
    """RFC 3986, appendix A."""
    plain, escaped = r"A-Za-z0-9._~!$&'()*+,;=\-", "%[0-9A-Fa-f]{2}"
    hex16, byte = "[0-9A-Fa-f]{1,4}", "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    last32 = rf"({hex16}:{hex16}|{byte}(\.{byte}){{3}})"
    addresses = [f"({hex16}:){{6}}{last32}", f"::({hex16}:){{5}}{last32}"]
    addresses += [f"(({hex16}:){{0,{n}}}{hex16})?::({hex16}:){{{4 - n}}}{last32}" for n in range(5)]
    addresses += [f"(({hex16}:){{0,5}}{hex16})?::{hex16}", f"(({hex16}:){{0,6}}{hex16})?::"]
    literal = rf"\[({'|'.join(addresses)}|[vV][0-9A-Fa-f]+\.[{plain}:]+)\]"
    authority = f"(([{plain}:]|{escaped})*@)?({literal}|([{plain}]|{escaped})*)(:[0-9]*)?"
    part = f"([{plain}:@]|{escaped})"
    beyond_first = f"(/{part}*)*"
    same = f"//{authority}{beyond_first}|/({part}+{beyond_first})?"
    absolute = f"[A-Za-z][A-Za-z0-9+.-]*:({same}|{part}+{beyond_first})?"
    relative = f"({same}|([{plain}@]|{escaped})+{beyond_first})?"
    rest = f"([{plain}:@/?]|{escaped})*"
    return rf"^({absolute}|{relative})(\?{rest})?(#{rest})?$"


FORMAT_PATTERNS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",  # RFC 6901
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "uri-reference": _uri_reference(),
}
UNENFORCED_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex")
"""Of the standard. Formats that it does not have are annotations."""

_DEFINITION = re.compile(r"#/(definitions|\$defs)/([^/%]*)(?:/.*)?", re.DOTALL)

NOTHING_FITS = (
    "no text follows it: whatever refers to itself needs a way that does not, and each set of characters one of them"
)
REFERS_ELSEWHERE = "`$ref` may only refer to a place in the schema itself, as in `#/$defs/name`"


class GrammarError(Exception):
    """A constraint that cannot be enforced; the sentence says what to change."""


Searcher = Callable[[str], Callable[[str], bool]]
"""From a pattern to whether it is found in a text; GrammarError if it is none."""


def rewrite(schema: Schema, searcher: Searcher) -> Schema:
    """The same instances, in enforceable keywords. GrammarError names the keyword that has no such form."""
    schema = _without_unused(schema)
    schema = _Rewriter(schema, searcher).schema(schema, 0)
    if patterns_together(schema) > MAX_PATTERNS:
        raise GrammarError(f"one string may have to match {MAX_PATTERNS} patterns at most")
    return schema


def _without_unused(root: Schema) -> Schema:
    """Without the definitions that nothing refers to: they may say what they like."""
    if not isinstance(root, dict):
        return root
    used: dict[str, dict[str, Schema]] = {"definitions": {}, "$defs": {}}
    rest = {key: value for key, value in root.items() if key not in used}
    left: list[Any] = [rest]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, dict):
            continue
        left += part.values()
        reference = part.get("$ref")
        if not isinstance(reference, str) or reference == "#":
            continue
        match = _DEFINITION.fullmatch(reference)
        if match is None:
            return root
        name = unescaped(match[2])
        definition = as_dict(root.get(match[1])).get(name)
        if definition is not None and name not in used[match[1]]:
            used[match[1]][name] = definition
            left.append(definition)
    return rest | {
        key: {name: root[key][name] for name in root[key] if name in names} for key, names in used.items() if names
    }


class _Rewriter:
    def __init__(self, root: Schema, searcher: Searcher) -> None:
        self._root = root
        self._searcher = searcher
        self._work = 0
        self._comparison = Comparison(self._seen, self._count_work)
        # Before 2019-09 a reference stood for all that is beside it.
        self._only_refs = isinstance(root, dict) and re.search(r"draft-0[3-7]", str(root.get("$schema"))) is not None

    def schema(self, schema: Schema, depth: int) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._count_work()
        if self._is_endless(schema):
            raise GrammarError("`$ref` refers to itself")
        if depth > MAX_DEPTH:
            raise GrammarError(f"schemas may be nested {MAX_DEPTH} deep at most")
        if self._only_refs and isinstance(schema.get("$ref"), str):
            kept = ("$ref", "definitions", "$defs", "$schema", "$id", "id")
            schema = {key: value for key, value in schema.items() if key in kept}
        for key in UNENFORCED:
            if key in schema:
                raise GrammarError(f"`{key}` cannot be enforced")
        written = schema
        schema = self._with_rewritten_parts(schema, depth)
        more = [*self._format(schema), *self._multiples(schema)]
        if schema.get("uniqueItems") is False or integer(schema.get("maxItems")) in (0, 1):
            schema.pop("uniqueItems", None)
        self._count_properties(schema)
        self._name_properties(schema)
        more += [*self._dependencies(schema), *self._conditions(schema)]
        more += self._alternatives(schema, written)
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
                    most = MAX_PATTERN_PROPERTIES if key == "patternProperties" else MAX_PROPERTIES
                    if len(value) > most:
                        raise GrammarError(f"`{key}` may have {most} entries at most")
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

    def _multiples(self, schema: dict[str, Any]) -> list[Schema]:
        """The library writes multiples of 0.25 as 2 and 2.50, not as 2.5: those with fewer decimals are added."""
        number = schema.get("multipleOf")
        if not isinstance(number, float) or number <= 0:
            return []
        decimals = -Decimal(repr(number)).as_tuple().exponent
        if not 2 <= decimals <= MAX_DECIMALS:
            return []
        del schema["multipleOf"]
        whole = int(Decimal(repr(number)).scaleb(decimals))
        ways = {number: None}
        ways |= {float(Decimal(lcm(whole, 10**less)).scaleb(-decimals)): None for less in range(1, decimals)}
        return [{"anyOf": [{"multipleOf": way} for way in ways]}]

    def _count_properties(self, schema: dict[str, Any]) -> None:
        """Drops bounds that hold anyhow."""
        least, most = integer(schema.get("minProperties")), integer(schema.get("maxProperties"))
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if least is not None and least <= len(set(names_in(schema.get("required")))):
            del schema["minProperties"]
        if most is not None and closed and len(as_dict(schema.get("properties"))) <= most:
            del schema["maxProperties"]

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """A pattern of names says for which of them additional properties are allowed at all."""
        if "propertyNames" not in schema:
            return
        names = self._resolved(schema.pop("propertyNames"))
        if names is True or (isinstance(names, dict) and not asserting(names)):
            return
        others = schema.get("additionalProperties", True)
        known = as_dict(schema.get("properties"))
        if schema.get("patternProperties"):
            raise GrammarError("`propertyNames` beside `patternProperties` cannot be enforced")
        if names is False:
            allowed, rest = (lambda name: False), {}
        elif not isinstance(names, dict):
            raise GrammarError("`propertyNames` must be a schema")
        elif set(asserting(names)) <= {"type", "pattern"} and names.get("type", "string") == "string":
            pattern = names.get("pattern", "")
            if not isinstance(pattern, str):
                raise GrammarError("a `pattern` must be a text")
            allowed, rest = self._searcher(pattern), {"patternProperties": {pattern: others}}
        elif set(asserting(names)) <= {"type", "enum"} and isinstance(names.get("enum"), list):
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
            for name, wanted in as_dict(schema.pop(key, None)).items():
                if isinstance(wanted, str):
                    wanted = [wanted]
                inner = {"required": wanted} if isinstance(wanted, list) else wanted
                if key == "dependencies":
                    inner = self.schema(inner, 0)
                # The name stands first, or else it could only come behind what it brings with it.
                found.append(
                    {"anyOf": [{"properties": {name: False}}, {"allOf": [{"properties": {name: True}}, inner]}]}
                )
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

    def _alternatives(self, schema: dict[str, Any], written: Mapping[str, Any]) -> list[Schema]:
        """`oneOf` whose branches exclude each other is `anyOf`; others are made to."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or len(branches) < 2:
            return []
        del schema["oneOf"]
        # As they were written more can be seen of them.
        seen = [self._seen(branch) for branch in written["oneOf"]]
        if list_different(seen) or self._all_exclude(seen, written):
            return [{"anyOf": branches}]
        kinds = {kind: self._all_exclude(seen, {**written, "type": kind}) for kind in types_of(written)}
        if all(exclude or sum(takes_all(kind, one) for one in seen) > 1 for kind, exclude in kinds.items()):
            return [{"anyOf": branches}, {"type": [kind for kind, exclude in kinds.items() if exclude]}]
        if len(branches) > MAX_BRANCHES:
            raise GrammarError(f"`oneOf` of more than {MAX_BRANCHES} branches that may hold together")
        exclusive = []
        for i, branch in enumerate(branches):
            others = [self.schema(self.negated(other, 0), 0) for j, other in enumerate(branches) if j != i]
            exclusive.append({"allOf": [branch, *others]})
        return [{"anyOf": exclusive}]

    def _all_exclude(self, branches: Sequence[Schema], around: Mapping[str, Any]) -> bool:
        pairs = ((a, b) for i, a in enumerate(branches) for b in branches[:i])
        return all(self._comparison.exclude(a, b, around) for a, b in pairs)

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
        for key, value in asserting(schema).items():
            ways += self._broken(key, value, schema, depth + 1)
        return {"anyOf": ways} if ways else False

    def _broken(self, key: str, value: Any, schema: Mapping[str, Any], depth: int) -> list[Schema]:
        match key, value:
            case "type", (str() | list()):
                others = [name for name in TYPES if name not in types_of(schema)]
                names = [value] if isinstance(value, str) else names_in(value)
                if "integer" in names and "number" not in names:
                    raise GrammarError("`not` with the type integer cannot be enforced")
                return [{"type": others}] if others else []
            case "enum", list():
                return _other_than(value)
            case "const", _:
                return _other_than([value])
            case "required", list() if len(names_in(value)) == len(value):
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
            case "propertyNames", _:
                return self._named_otherwise(value)
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

    def _named_otherwise(self, names: Schema) -> list[Schema]:
        """Ways to have a property that is not called so."""
        names = self._resolved(names)
        if names is False:
            return [{"type": "object", "minProperties": 1}]
        others = listed_in(as_dict(as_dict(names).get("not")))
        if set(asserting(as_dict(names))) != {"not"} or others is None or len(asserting(names["not"])) > 1:
            raise GrammarError("`not` of `propertyNames` can be enforced with false or a `not` of an `enum` only")
        return [{"type": "object", "required": [name]} for name in others if isinstance(name, str)]

    def _seen(self, schema: Schema) -> Schema:
        """Resolved; None if a reference has more beside it."""
        if isinstance(schema, dict) and "$ref" in schema and not self._is_only_reference(schema):
            return None
        return self._resolved(schema)

    def _is_only_reference(self, schema: Mapping[str, Any]) -> bool:
        return self._only_refs or set(asserting(schema)) == {"$ref"}

    def _is_endless(self, schema: Schema) -> bool:
        """Whether a reference leads to nothing but itself."""
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or not re.match("#(/|$)", reference):
                return False
            schema = pointed_at(self._root, reference)
        return True

    def _resolved(self, schema: Schema) -> Schema:
        """A schema that is a reference and nothing else, as what it refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if not self._is_only_reference(schema):
                raise GrammarError("keywords beside `$ref` cannot be negated")
            schema = self._at(schema["$ref"])
        raise GrammarError("`$ref` refers to itself")

    def _at(self, reference: Any) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GrammarError(REFERS_ELSEWHERE)
        place = pointed_at(self._root, reference)
        if place is None:
            raise GrammarError(f"`$ref`: there is no {reference[:100]}")
        return place


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
