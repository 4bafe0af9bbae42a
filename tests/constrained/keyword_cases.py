"""Keyword by keyword: schemas, with instances that they accept and instances that they refuse."""

OBJECT = {"type": "object"}

ENFORCED = {
    "type": [
        ({"type": "string"}, ["", 'a\n"é'], [1, None, [], {}]),
        ({"type": "integer"}, [0, -7, 120], [1.5, "1", True]),
        ({"type": "number"}, [0, -1.5, 1e3], ["1", None, False]),
        ({"type": ["null", "boolean"]}, [None, True, False], [0, "null", []]),
        ({"type": "array"}, [[], [1, ["a"]]], [{}, "[]"]),
        ({"type": "object"}, [{}, {"a": {"b": 1}}], [[], "{}"]),
    ],
    "enum": [({"enum": ["a", 1, None, {"b": [2]}]}, ["a", 1, None, {"b": [2]}], ["b", 2, {"b": [3]}, {}])],
    "const": [({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {}, None])],
    "properties": [
        ({**OBJECT, "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}, {"b": "x"}], [{"a": "x"}, {"a": 1.5}]),
        ({**OBJECT, "properties": {"a": False, "b": True}}, [{}, {"b": 1}], [{"a": 1}]),
    ],
    "required": [
        ({**OBJECT, "properties": {"a": {}, "b": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{}, {"a": 1}]),
        ({**OBJECT, "required": ["z"]}, [{"z": 1}], [{}, {"y": 1}]),
    ],
    "additionalProperties": [
        (
            {**OBJECT, "properties": {"a": {}}, "additionalProperties": False},
            [{}, {"a": 1}],
            [{"b": 1}, {"a": 1, "b": 1}],
        ),
        ({**OBJECT, "additionalProperties": {"type": "null"}}, [{}, {"x": None}], [{"x": 1}]),
    ],
    "patternProperties": [
        ({**OBJECT, "patternProperties": {"^x": {"type": "integer"}}}, [{"x1": 1}, {"y": "a"}], [{"x1": "a"}]),
    ],
    "propertyNames": [
        ({**OBJECT, "propertyNames": {"pattern": "^[a-c]+$"}}, [{}, {"ab": 1}], [{"d": 1}, {"ab": 1, "x": 2}]),
        (
            {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "properties": {"b": {"const": 1}}},
            [{"b": 1}],
            [{"b": 2}, {"c": 1}],
        ),
        ({**OBJECT, "propertyNames": False}, [{}], [{"a": 1}]),
        # With backtracking this pattern would take hours to see that it is not there.
        (
            {**OBJECT, "propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 40 + "!": {}, "aa": {"const": 1}}},
            [{"aa": 1}, {"aaa": 2}],
            [{"aa": 2}],
        ),
    ],
    "minProperties, maxProperties": [
        (
            {**OBJECT, "minProperties": 1, "maxProperties": 2},
            [{"a": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 1, "b": 2, "c": 3}],
        ),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 2},
            [{}, {"a": 1, "b": 1}],
            [{"c": 1}],
        ),
    ],
    "dependencies": [
        ({**OBJECT, "dependencies": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}, {"a": 1, "c": 1}]),
        (
            {
                **OBJECT,
                "required": ["a"],
                "dependencies": {"a": {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}},
            },
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
            [{"a": 1}, {"b": 1}],
        ),
        (
            {
                **OBJECT,
                "properties": {"a": {}, "b": {}},
                "dependencies": {"a": {"properties": {"b": {"type": "null"}}}},
            },
            [{"b": 1}, {"a": 1}, {"a": 1, "b": None}],
            [{"a": 1, "b": 1}],
        ),
    ],
    "dependentRequired": [
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            [{}, {"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}],
        ),
    ],
    "dependentSchemas": [
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
            [{}, {"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}],
        ),
    ],
    "items": [({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]])],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, [[], [1], [1, 2, 2]], [[2], [1, 1]]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[], [1]], [[1, 1]]),
    ],
    "minItems, maxItems": [({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]])],
    "uniqueItems": [
        ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ],
    "minLength, maxLength": [
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "éöü", "日本"], ["a", "abcd", ""]),
    ],
    "pattern": [
        ({"type": "string", "pattern": "^a+b?$"}, ["a", "aab"], ["b", "ac", ""]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["a", ""]),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["abc"], ["abcd", "ab1", ""]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-2-29", "x"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["1.2.3", "256.1.1.1"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426655440000"], ["123e4567"]),
        ({"type": "string", "format": "made-up"}, ["anything"], [1]),
        ({"type": "string", "format": "json-pointer"}, ["", "/a/b~1"], ["a", "/~2"]),
        ({"type": "string", "format": "relative-json-pointer", "maxLength": 4}, ["0#", "12/a"], ["/a", "01", "0/abc"]),
        (
            {"type": "string", "format": "uri-reference"},
            [
                "",
                "../a%41#b",
                "//u:p@[2001:db8::1.2.3.4]:80/x",
                "//[1:2:3:4:5:6:7:8]",
                "mailto:a@b.c",
                "/?q=/?",
                "./1:b",
            ],
            ["a b", "1:b", ":", "/a#b#c", "//[1::2::3]", "//[1:2:3:4:5:6:7]", "//a:b", "%4g", "é", "http://[x"],
        ),
    ],
    "minimum, maximum": [
        ({"type": "integer", "minimum": -5, "maximum": 112}, [-5, 0, 112], [-6, 113, 1000]),
        ({"type": "number", "minimum": 0.5}, [0.5, 7], [0.25, -1]),
    ],
    "exclusiveMinimum, exclusiveMaximum": [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001], [0, 1, -1]),
    ],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 3}, [0, 3, -9, 12], [1, 10]),
        ({"type": "number", "multipleOf": 0.25}, [2, 2.0, 2.5, -2.25, 0], [2.2, 0.1, 1.125]),
        ({"multipleOf": 0.005, "maximum": 1}, [0.1, 0.05, 0.005, 1, "a"], [0.001, 0.0005, 1.005]),
    ],
    "anyOf": [
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["a", 3], [2, None]),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
            [{}],
        ),
    ],
    "oneOf": [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 1}],
        ),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}], "type": "number"}, [2, 6], [3, 4, 5]),
        (
            {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", {"d": [1.0]}]}, {"const": {"d": [2]}}]},
            ["a", {"d": [1]}],
            [3],
        ),
        ({"oneOf": [{"enum": ["a", "c"]}, {"enum": ["b", "c"], "type": ["string", "number"]}]}, ["a", "b"], ["c", 1]),
        (
            {
                **OBJECT,
                "properties": {"kind": {}, "size": {"type": "integer"}},
                "required": ["kind"],
                "oneOf": [
                    {"properties": {"kind": {"enum": ["a", "b"]}}},
                    {"properties": {"kind": {"type": "string", "not": {"enum": ["a", "b", "c"]}}}},
                ],
            },
            [{"kind": "a"}, {"kind": "d", "size": 1}],
            [{"kind": "c"}, {"kind": 1}, {}],
        ),
        # Nothing but an object can be one of these two alone.
        (
            {
                "$ref": "#/$defs/change",
                "$defs": {
                    "change": {
                        "oneOf": [
                            {"required": ["of"], "properties": {"of": {"enum": ["text", "mode"]}}},
                            {"required": ["of"], "properties": {"of": {"enum": [["deleted"], "none"]}}},
                            {"required": ["of"], "properties": {"of": {"type": "array", "items": {"const": "x"}}}},
                        ]
                    }
                },
            },
            [{"of": "text"}, {"of": "none"}, {"of": ["deleted"]}, {"of": []}, {"of": ["x", "x"]}],
            [{}, {"of": "x"}, 1, "text", [], None],
        ),
        (
            {
                "oneOf": [
                    {"type": "array", "maxItems": 0},
                    {"type": "array", "minItems": 1, "items": {"type": "integer"}},
                    {"type": "array", "minItems": 2, "items": {"type": "string"}},
                ]
            },
            [[], [1], [1, 2], ["a", "b"]],
            [["a"], [1, "a"], {}],
        ),
    ],
    "allOf": [
        ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]}, [1, 3], [0, 4, "a"]),
        (
            {
                "allOf": [
                    {**OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"a": {"minimum": 2}}},
                ]
            },
            [{"a": 2}],
            [{"a": 1}, {}],
        ),
    ],
    "not": [
        ({"type": "string", "not": {"enum": ["ab", "b", "é"]}}, ["a", "abc", "", "ba", "ö"], ["ab", "b", "é"]),
        ({"not": {"type": ["string", "object"]}}, [1, None, [], True], ["a", {}]),
        ({**OBJECT, "properties": {"a": {}}, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6], [3, 4, 5]),
        ({"enum": ["a", "b", 1], "not": {"type": "string"}}, [1], ["a", "b"]),
        ({**OBJECT, "not": {"propertyNames": False}}, [{"a": 1}], [{}]),
        (
            {**OBJECT, "not": {"propertyNames": {"not": {"enum": ["a", "b"]}}}},
            [{"a": 1, "c": 1}, {"b": 1}],
            [{}, {"c": 1}],
        ),
    ],
    "if, then, else": [
        (
            {
                **OBJECT,
                "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
                "required": ["kind"],
                "if": {"properties": {"kind": {"const": "x"}}},
                "then": {"required": ["n"]},
                "else": {"properties": {"n": {"minimum": 5}}},
            },
            [{"kind": "x", "n": 1}, {"kind": "y"}, {"kind": "y", "n": 5}],
            [{"kind": "x"}, {"kind": "y", "n": 1}, {}],
        ),
    ],
    "$ref, $defs": [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
            },
            [{}, {"n": {"n": {}}}],
            [{"n": 1}, {"m": {}}],
        ),
        (
            {"type": "integer", "$defs": {"unused": {"contains": {}}}, "definitions": {"~": {"format": "regex"}}},
            [1],
            ["a"],
        ),
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/definitions/c"}}, "definitions": {"c": {"const": 1}}},
            [1],
            [2],
        ),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [2, "a"]),
    ],
}
"""Keyword -> [(schema, instances it accepts, instances it refuses)]; properties are in the schema's order."""


def doubling(twice, first=None):
    """Definitions of which each has the one before two times."""
    return {"0": first or {"type": "string"}} | {str(at): twice({"$ref": f"#/$defs/{at - 1}"}) for at in range(1, 21)}


REFUSED = {
    "$ref to elsewhere": [{"$ref": "http://localhost/x.json"}, {"$ref": "other.json#/a"}],
    "contains": [{"type": "array", "contains": {"const": 1}}],
    "uniqueItems": [{"type": "array", "uniqueItems": True}],
    "unevaluatedProperties": [{"type": "object", "unevaluatedProperties": False}],
    "unevaluatedItems": [{"type": "array", "unevaluatedItems": False}],
    "$dynamicRef": [{"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}],
    "draft 3's extends, disallow, divisibleBy": [
        {"extends": {"type": "null"}},
        {"disallow": "string"},
        {"divisibleBy": 3},
    ],
    "pattern with look-around": [{"type": "string", "pattern": "^(?!x)"}],
    "propertyNames": [{"type": "object", "propertyNames": {"minLength": 3}}],
    "not": [
        {"not": {"pattern": "a"}},
        {"not": {"items": {"const": 1}}},
        {"not": {"type": "integer"}},
        {"not": {"enum": [1.5]}},
        {"not": {"format": "date"}},
        {"not": {"unevaluatedProperties": False}},
        {"not": {"propertyNames": {"enum": ["a"]}}},
    ],
    "if": [{"if": {"pattern": "a"}, "then": {"maxLength": 3}}],
    "oneOf": [
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        {"oneOf": [{"type": "array", "items": {"const": 1}}, {"type": "array", "items": {"const": 2}}]},
        {
            "oneOf": [
                {"required": ["a"], "properties": {"a": {"type": "integer"}}},
                {"properties": {"b": {"pattern": "x"}}},
            ]
        },
    ],
    "unsatisfiable": [
        False,
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"const": 1, "type": "string"},
    ],
    "format": [{"format": "regex"}, {"format": "iri-reference", "type": "string"}, {"format": "idn-email"}],
    "too large once it is written out": [
        {"not": {"$ref": "#/$defs/20"}, "$defs": doubling(lambda one: {"anyOf": [one, one]})},
        {
            "oneOf": [{"$ref": "#/$defs/20"}] * 2,
            "$defs": doubling(lambda one: {**OBJECT, "properties": {"a": one, "b": one}, "required": ["a", "b"]}),
        },
        {
            "not": {"$ref": "#/$defs/3"},
            "$defs": doubling(lambda one: {"anyOf": [one, one]}, {"allOf": [{"const": "x" * 400}] * 20}),
        },
    ],
    "no type": [{"type": "objekt"}, {"type": ["string", "nope"]}],
    "malformed": [
        {"properties": 3},
        {"required": "a"},
        {"minimum": "a"},
        {"enum": 1},
        {"items": 3},
        {"pattern": "("},
        {"type": "object", "properties": {"a": 5}},
        {"anyOf": {}},
        {"maxLength": -1},
        {"$ref": "#/nope"},
        {"not": 5},
        {"not": {"enum": 5}},
        {"not": {"required": [[1]]}},
        {"allOf": 1, "not": {"type": "string"}},
        {"if": {"$ref": "#/$defs"}, "then": False, "$defs": [1]},
        {"propertyNames": {"pattern": 5}},
        {"propertyNames": {"pattern": "("}, "properties": {"a": {}}},
    ],
}
"""What is not enforced -> schemas that are refused."""
