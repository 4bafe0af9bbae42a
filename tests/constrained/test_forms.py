"""What each form of constraint lets through."""

import json
import re

import pytest
from walk import BACKEND, CHECK, OTHER, TABLE, accepts, accepts_text, allowed

from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import Form
from srt.schema_rules import GrammarError
from srt.token_bytes import Vocabulary

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    "pattern", ["a+b?", "(ab|c){2,3}", r"[^\n]x", r"\d\d", "a/b", "é|日", "^ab$", "(?i)ab", r"a\.b", ""]
)
def test_a_regex_matches_the_whole_output(pattern):
    for text in (
        "a",
        "ab",
        "aab",
        "abc",
        "abab",
        "cabc",
        "zx",
        "\nx",
        "12",
        "1",
        "a/b",
        "é",
        "日",
        "AB",
        "a.b",
        "axb",
        "",
    ):
        assert accepts_text("regex", pattern, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", ["[a-", "(ab", "a{2,1}", "(?=a)b", r"(a)\1", r"\ba"])
def test_a_regex_that_cannot_be_followed_is_refused(pattern):
    with pytest.raises(GrammarError):
        CHECK(Form("regex", pattern, "x"))


def test_ebnf():
    grammar = 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"'
    for text, valid in (("1", True), ("1+(2+3)", True), ("1+", False), ("()", False), ("", False)):
        assert accepts_text("ebnf", grammar, text) == valid
    assert accepts_text("ebnf", 'root ::= root "a" | "b"', "baa")
    assert accepts_text("ebnf", "\n" * 250_000 + 'root ::= "a"', "a")
    assert accepts_text("ebnf", '\n  start: "a"', "a")
    for bad in ("root ::= missing", "root ::= (", 'other ::= "a"', ""):
        with pytest.raises(GrammarError):
            CHECK(Form("ebnf", bad, "x"))


def test_choice():
    choices = ["yes", "no", 'a "quoted" one\n', "é"]
    assert all(accepts_text("choice", choices, text) for text in choices)
    assert not any(accepts_text("choice", choices, text) for text in ("", "ye", "yesno", "e"))


def test_white_space_is_bounded():
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1\n  ]\n}'):
        assert accepts_text("json_schema", schema, text)
    for text in ('{"a":  [1]}', '{\n\n"a":[1]}', '{"a":[1]} ', ' {"a":[1]}', "{\n" + 8 * " " + '"a":[]}', '{"a":\t[]}'):
        assert not accepts_text("json_schema", schema, text)
    assert not accepts_text("json_schema", schema, '{"a": []}', whitespace="")
    assert accepts_text("json_schema", schema, '{"a":[]}', whitespace="")
    assert accepts_text("json_schema", schema, '{"a":\t\t[]}', whitespace=r"[\t]{1,3}")


def test_strings_are_strict_json():
    for inside, valid in (
        (r"\n\"\\", True),
        ("é日😀", True),
        ("\n", False),
        ("\t", False),
        ("\x00", False),
        (r"\x", False),
    ):
        assert accepts_text("json_schema", {"type": "string"}, f'"{inside}"') == valid
    assert not accepts_text("json_schema", {"type": "integer"}, "007")


def test_properties_come_in_the_schemas_order():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z", "a"]}
    assert accepts_text("json_schema", schema, '{"z":1,"a":2}')
    assert not accepts_text("json_schema", schema, '{"a":2,"z":1}')


# ---- structural tags ------------------------------------------------------------------------------------------------


def tag(**fields):
    return {"type": "structural_tag", "format": fields}


def test_free_text_with_structures_in_it():
    value = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    for text in ("", "no tags", "x <f=a>12</f> y", "<f=b>null</f><f=a>1</f>", "a < b, <f"):
        assert accepts_text("structural_tag", value, text), text
    for text in ("<f=a>", "<f=c>1</f>", "<f=a>null</f>", "x <f=b>1</f>", "<f=a>12</f"):
        assert not accepts_text("structural_tag", value, text), text


def test_triggered_tags_may_be_wanted_once():
    tags = [{"begin": "<f>", "content": INTEGER, "end": "</f>"}]
    wanted = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags, "at_least_one": True}
    assert accepts_text("structural_tag", tag(**wanted), "a<f>1</f>b<f>2</f>")
    assert not accepts_text("structural_tag", tag(**wanted), "ab")
    once = {**wanted, "stop_after_first": True}
    assert accepts_text("structural_tag", tag(**once), "a<f>1</f>")
    assert not accepts_text("structural_tag", tag(**once), "a<f>1</f>b")


def test_sequences_choices_and_separators():
    yes_no = {"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("yes", "no")]}
    value = tag(type="sequence", elements=[{"type": "const_string", "value": "> "}, yes_no, {"type": "any_text"}])
    assert accepts_text("structural_tag", value, "> yes, of course")
    assert not accepts_text("structural_tag", value, "> maybe")
    items = tag(
        type="tags_with_separator",
        separator=", ",
        at_least_one=True,
        tags=[
            {"begin": "[", "content": INTEGER, "end": "]"},
            {"begin": "(", "content": {"type": "any_text"}, "end": ")"},
        ],
    )
    for text, valid in (("[1]", True), ("[1], (a [b)", True), ("", False), ("[1],[2]", False), ("[a]", False)):
        assert accepts_text("structural_tag", items, text) == valid
    pattern = tag(type="regex", pattern="a/b+")
    assert accepts_text("structural_tag", pattern, "a/bb")


def test_special_tokens_are_no_text():
    value = tag(
        type="triggered_tags", triggers=["<tool>"], tags=[{"begin": "<tool>", "content": INTEGER, "end": "<eos>"}]
    )
    grammar = CHECK(Form("structural_tag", value, "x"))
    assert accepts(grammar, [*b"a<tool>b"]), "letters that look like one"
    matcher = BACKEND.compile(grammar.text).matcher()
    for token in (ord("a"), OTHER):
        assert token in allowed(matcher)
        matcher.accept(token)
    assert set(map(chr, allowed(matcher))) == set("-0123456789")
    assert OTHER not in allowed(BACKEND.compile(CHECK(Form("regex", ".*", "x")).text).matcher())


@pytest.mark.parametrize(
    "value",
    [
        {}, {"format": {}}, {"format": {"type": "magic"}}, {"structures": [], "triggers": ["a"]},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": []},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]},
        {"structures": [{"begin": "<f>", "schema": {"type": "objekt"}, "end": ""}], "triggers": ["<f"]},
        tag(type="triggered_tags", triggers=["<"], tags=[{"begin": "<", "content": INTEGER, "end": ""}], x=1),
        tag(type="sequence", elements=[{"type": "any_text"}, {"type": "const_string", "value": "a"}]),
        tag(type="tag", begin="a", content=INTEGER),
    ],
)  # fmt: skip
def test_a_structural_tag_that_cannot_be_followed_is_refused(value):
    with pytest.raises(GrammarError):
        CHECK(Form("structural_tag", value, "x"))


# ---- limits ---------------------------------------------------------------------------------------------------------


def nested(depth):
    schema = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BOMBS = {
    "deep": nested(3000),
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "references in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a negation that contains itself": {"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}},
    "a pattern of patterns": {"type": "string", "pattern": "^((([a-z]{1,99}){1,99}){1,99}){1,99}$"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_bounded(name):
    """Whatever is let in compiles and gives masks under limits that count work, not time."""
    try:
        matcher = BACKEND.compile(CHECK(Form("json_schema", BOMBS[name], "x")).text).matcher()
    except GrammarError:
        return
    for token in b'"ab':
        allowed(matcher)
        matcher.accept(token)


COSTLY = {
    "an intersection of many patterns": (
        "json_schema",
        {"$ref": "#/$defs/a", "pattern": "x"}
        | {"$defs": {"a": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(2, 16)]}}},
        "12 patterns",
    ),
    "many patterns of names": (
        "json_schema",
        {"type": "object", "patternProperties": {f"^x{n}_[a-z]+$": {} for n in range(300)}},
        "100 entries",
    ),
    "many rules of GBNF": (
        "ebnf",
        "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(900)), 'r900 ::= "a"']),
        "300 rules",
    ),
    "many rules of Lark": (
        "ebnf",
        "\n".join(["start: R0", *(f"R{n}: R{n + 1} R{n + 1}" for n in range(900)), 'R900: "a"']),
        "300 rules",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_takes_the_library_many_seconds_is_refused_before(name):
    kind, value, reason = COSTLY[name]
    with pytest.raises(GrammarError, match=reason):
        CHECK(Form(kind, value, "x"))


def test_a_model_without_eos_ends_where_only_that_is_left():
    backend = LLGuidance(Vocabulary(TABLE[:256], [0] * 256, (), lambda text: list(text.encode())))
    matcher = backend.compile(CHECK(Form("regex", "ab", "x")).text).matcher()
    for token in b"ab":
        assert not matcher.ended
        matcher.accept(token)
    assert matcher.ended
    assert not matcher.fault


def test_a_grammars_text_keeps_the_order_of_a_schema():
    schema = json.loads('{"properties": {"b": {}, "a": {}}, "type": "object"}')
    text = CHECK(Form("json_schema", schema, "x")).text
    assert text.index('"b"') < text.index('"a"')
