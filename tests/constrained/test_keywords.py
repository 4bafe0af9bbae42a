"""Each keyword of JSON Schema is enforced exactly or refused; `jsonschema` says what exactly means."""

import ipaddress
import re
from pathlib import Path

import jsonschema
import pytest
from keyword_cases import ENFORCED, REFUSED
from walk import BACKEND, CHECK, accepts_json

from srt.frontend.constraints import Form
from srt.schema_rules import GrammarError

FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("json-pointer")
def is_pointer(text):
    return not text or (text[0] == "/" and re.search("~(?![01])", text) is None)


@FORMATS.checks("relative-json-pointer")
def is_relative_pointer(text):
    start = re.match("0|[1-9][0-9]*", text)
    return start is not None and (text[start.end() :] == "#" or is_pointer(text[start.end() :]))


@FORMATS.checks("uri-reference", raises=ValueError)
def is_uri_reference(text):
    """Cut as RFC 3986's appendix B says, then part by part."""
    cut = re.fullmatch(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", text, re.DOTALL)
    scheme, authority, path, query, fragment = cut.groups()
    user, _, host = (authority or "").rpartition("@")
    if host.startswith("["):
        address, _, host = host[1:].partition("]")
        ipaddress.IPv6Address(address)
    name, _, port = host.partition(":")
    texts = "".join([user, name, path, query or "", fragment or ""])
    return (
        (scheme is None or re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) is not None)
        and not (scheme is None and authority is None and ":" in path.partition("/")[0])
        and re.fullmatch(r"[0-9]*", port) is not None
        and re.fullmatch(r"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*", texts) is not None
    )


@pytest.mark.parametrize("keyword", ENFORCED)
def test_what_is_valid_passes_and_nothing_else(keyword):
    for schema, valid, invalid in ENFORCED[keyword]:
        judge = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        if keyword == "dependencies":
            judge = jsonschema.Draft7Validator(schema)
        for instance in valid:
            assert judge.is_valid(instance), (schema, instance)
            assert accepts_json(schema, instance), (schema, instance)
        for instance in invalid:
            assert not judge.is_valid(instance), (schema, instance)
            assert not accepts_json(schema, instance), (schema, instance)


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_enforced_is_refused(keyword):
    for schema in REFUSED[keyword]:
        with pytest.raises(GrammarError):
            CHECK(Form("json_schema", schema, "x"))


def test_the_library_s_words_become_sentences():
    with pytest.raises(GrammarError, match='^"uniqueItems" cannot be enforced$'):
        CHECK(Form("json_schema", {"type": "array", "uniqueItems": True}, "x"))
    with pytest.raises(GrammarError, match=r"^the pattern `\^\(\?=a\)b`: look-around, .* is not supported$"):
        CHECK(Form("json_schema", {"properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}}, "x"))


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", {"$ref": "#"}, "refers to itself"),
        ("json_schema", {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "itself"),
        ("json_schema", {"$ref": "http://localhost/x.json"}, "only refer to a place in the schema"),
        ("json_schema", False, "allows no value"),
        ("json_schema", {"type": "integer", "minimum": -(2**63)}, r"between -10\*\*18 and"),
        ("json_schema", {"type": "number", "minimum": -(10**400)}, "between -1e308 and"),
        ("regex", r"[^\x00-\U0010FFFF]", "each set of characters one of them"),
        ("ebnf", "root ::= root", "refers to itself needs a way that does not"),
    ],
)
def test_a_refusal_says_what_to_change(kind, value, words):
    with pytest.raises(GrammarError, match=words):
        CHECK(Form(kind, value, "x"))


def test_a_text_that_never_ends_is_named():
    matcher = BACKEND.compile(CHECK(Form("ebnf", 'root ::= "a" root', "x")).text).matcher()
    matcher.forced(1)
    assert "each come to its end" in matcher.fault


def test_a_schema_may_contain_itself():
    CHECK(Form("json_schema", {"properties": {"$ref": {"$ref": "#"}, "a": {"$ref": "#/properties/$ref"}}}, "x"))


def test_the_table_in_the_docs_has_these_cases():
    table = (Path(__file__).parents[2] / "docs" / "json-schema.md").read_text()
    for keyword, cases in ENFORCED.items():
        accepted, refused = (sum(len(case[at]) for case in cases) for at in (1, 2))
        name = ", ".join(f"`{one}`" for one in keyword.split(", "))
        assert f"| {name} | {len(cases)} | {accepted} | {refused} |\n" in table
    for what, schemas in REFUSED.items():
        assert f"| {what} | {len(schemas)} |\n" in table
