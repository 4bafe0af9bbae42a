"""Under a chat's grammar a model says nothing but what was asked for: random walks through the masks, parsed again."""

import dataclasses
import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from frontend_harness import EOS, byte_tokenizer

from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import Form
from srt.frontend.errors import RequestError
from srt.frontend.grammar_check import GrammarCheck
from srt.frontend.openai.chat_constraint import constraint
from srt.frontend.openai.tools import Function, ToolUse
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.pieces import Arguments, CallStart, Content, Reasoning
from srt.frontend.parsing.reasoning import FORMATS as REASONING
from srt.frontend.parsing.tool_calls import FORMATS, JSON_LIST

UNIT = {"enum": ["c", "f"]}
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"],
        "$defs": {"unit": UNIT},
    },
    strict=True,
)
ROLL = Function("roll", {"properties": {"sides": {"type": "integer", "minimum": 1, "maximum": 20}}}, strict=False)
ANY = Function("any", {"type": "object", "additionalProperties": {"type": "boolean"}}, strict=False)
PING = Function("ping", {"type": "object", "properties": {}}, strict=False)
FUNCTIONS = (WEATHER, ROLL, ANY, PING)
SCHEMAS = {
    "get_weather": {**WEATHER.parameters, "additionalProperties": False},
    "roll": {**ROLL.parameters, "type": "object", "additionalProperties": False},
    "any": ANY.parameters,
    "ping": {"const": {}},
}
JSON_FORMATS = {
    "hermes": FORMATS["hermes"],
    "llama3": FORMATS["llama3"],
    "mistral": FORMATS["mistral"],
    "list": JSON_LIST,
}
PROMPTS = {"": None, "no thoughts": "qwen3", "<think>\n": "qwen3", "<think>\n\n</think>\n\n": "qwen3"}
THOUGHTS = {"": "", "no thoughts": "<think>hm {</think>", "<think>\n": "hm\n</think>", "<think>\n\n</think>\n\n": ""}


class Door:
    def __init__(self, folder):
        self.tokenizer = byte_tokenizer(folder, ["[TOOL_CALLS]", "<|python_tag|>"])
        vocabulary = self.tokenizer.vocabulary((EOS,))
        self.check, self.backend = GrammarCheck(vocabulary), LLGuidance(vocabulary)
        self.size = self.tokenizer.vocab_size

    def grammar(self, form):
        return self.backend.compile(self.check(form).text)

    def allowed(self, matcher):
        bits = np.zeros((1, (self.size + 31) // 32), np.uint32)
        self.backend.fill([matcher], bits.view(np.int32))
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: self.size]).tolist()

    def takes(self, form, text):
        matcher = self.grammar(form).matcher()
        for token in self.tokenizer.encode(text, False):
            matcher.accept(token)
        return not matcher.fault and EOS in self.allowed(matcher)

    def walk(self, form, rng, begin, most=400):
        """(text, whether it ended) of a model that says anything after `begin`, as briefly as it can."""
        matcher, ids = self.grammar(form).matcher(), self.tokenizer.encode(begin, False)
        for token in ids:
            matcher.accept(token)
        while len(ids) < most:
            allowed = self.allowed(matcher)
            ends = [token for token in allowed if token >= EOS or chr(token) in '"}]']
            token = rng.choice(ends if ends and rng.random() < 0.6 else allowed)
            if token == EOS:
                return self.tokenizer.decode(ids, False), True
            matcher.accept(token)
            assert not matcher.fault
            ids.append(token)
        return self.tokenizer.decode(ids, False), False


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    return Door(tmp_path_factory.mktemp("tokenizer"))


def answer_format(form, prompt="", **options):
    marks = PROMPTS.get(prompt)
    names = tuple(function.name for function in FUNCTIONS)
    return AnswerFormat(
        prompt, REASONING[marks] if marks else None, calls=form, names=names, constrained=True, **options
    )


def read(form, text):
    """(reasoning, content, [(name, arguments)], whether the calls are whole), letter by letter."""
    parser = form.parser()
    pieces = [piece for letter in text for piece in parser.feed(letter)] + parser.finish()
    calls = [
        (piece.name, "".join(one.text for one in pieces if isinstance(one, Arguments) and one.index == piece.index))
        for piece in pieces
        if isinstance(piece, CallStart)
    ]
    texts = ["".join(piece.text for piece in pieces if isinstance(piece, kind)) for kind in (Reasoning, Content)]
    return *texts, calls, parser.called


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("most_calls", [None, 1])
def test_a_forced_answer_is_calls_and_nothing_else(door, name, prompt, most_calls):
    form = answer_format(JSON_FORMATS[name], prompt, max_calls=most_calls)
    wanted = constraint(None, ToolUse((), FUNCTIONS, forced=True, max_calls=most_calls), form)
    rng, finished = random.Random(name + prompt), 0
    for _ in range(6):
        text, ended = door.walk(wanted, rng, THOUGHTS[prompt])
        if not ended:
            continue
        finished += 1
        _, content, calls, whole = read(form, text)
        assert (content, whole) == ("", True)
        assert most_calls is None or len(calls) == 1
        for function, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
    assert finished


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_with_a_strict_function_what_begins_as_a_call_goes_on_as_one(door, name):
    form = answer_format(JSON_FORMATS[name])
    wanted = constraint(None, ToolUse((), FUNCTIONS), form)
    good, bad = '{"city": "Oslo", "unit": "c"}', '{"city": "Oslo", "unit": "kelvin"}'
    write = JSON_FORMATS[name].write
    assert door.takes(wanted, "Hello!")
    assert door.takes(wanted, "")
    assert door.takes(wanted, write([("get_weather", good)]))
    assert door.takes(wanted, write([("get_weather", good), ("roll", '{"any": 1}')]))
    assert not door.takes(wanted, write([("get_weather", bad)]))
    assert not door.takes(wanted, write([("roll", "[1]")]))
    assert not door.takes(wanted, write([("unknown", "{}")]))
    assert door.takes(wanted, "See: " + write([("get_weather", good)]))
    assert name == "llama3" or not door.takes(wanted, "See: " + write([("get_weather", bad)]))


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_call_with_marks_is_a_call_of_some_function_with_an_object(door, name):
    form = answer_format(JSON_FORMATS[name])
    loose = tuple(dataclasses.replace(function, strict=False) for function in FUNCTIONS)
    wanted, write = constraint(None, ToolUse((), loose), form), JSON_FORMATS[name].write
    assert door.takes(wanted, "Hello {[<tool")
    assert door.takes(wanted, "See: " + write([("roll", '{"any": [1, "}"]}'), ("ping", "{}")]))
    for call in (("unknown", "{}"), ("roll", "[1]"), ("roll", '{"a": tru}'), ("roll", "null"), ("roll", '"{}"')):
        assert not door.takes(wanted, "See: " + write([call]))


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_answer_in_json_may_be_calls_instead(door, name, prompt):
    form = answer_format(JSON_FORMATS[name], prompt)
    schema = {
        "type": "object",
        "properties": {"z": {"type": "integer"}},
        "required": ["z"],
        "additionalProperties": False,
    }
    wanted = constraint(Form("json_schema", schema, "response_format"), ToolUse((), FUNCTIONS), form)
    thought = THOUGHTS[prompt] if prompt == "<think>\n" else ""
    call = JSON_FORMATS[name].write([("ping", '{"a": 1}')])
    mark = "<|python_tag|>" if name == "llama3" else ""
    assert door.takes(wanted, thought + '{"z": 1}')
    assert door.takes(wanted, thought + mark + call)
    assert read(form, thought + '{"z": 1}')[1:] == ('{"z": 1}', [], False)
    assert read(form, thought + mark + call)[1:] == ("", [("ping", '{"a": 1}')], True)
    assert not door.takes(wanted, thought + "Hello")
    assert not door.takes(wanted, thought + '{"z": "1"}')
    assert door.takes(wanted, '<think>hm</think>\n{"z": 1}') == (prompt != "" and "</think>" not in prompt)


@pytest.mark.parametrize("asked", [("regex", "[ab]+"), ("choice", ["a", "ab"])])
def test_other_constraints_begin_after_the_reasoning(door, asked):
    form = answer_format(None, "<think>\n")
    wanted = constraint(Form(*asked, "x"), ToolUse(), form)
    assert door.takes(wanted, "hm {} </think>\n\nab")
    assert door.takes(wanted, "</think>a")
    assert not door.takes(wanted, "ab")
    assert not door.takes(wanted, "hm</think>c")
    ebnf = Form("ebnf", 'root ::= "a"', "ebnf")
    with pytest.raises(RequestError, match="goes neither"):
        constraint(ebnf, ToolUse(), form)
    assert constraint(ebnf, ToolUse(), answer_format(None, "no thoughts")) is ebnf


def test_a_constraint_begins_after_the_token_that_ends_the_reasoning(door):
    form, ebnf = answer_format(FORMATS["hermes"], "<think>\n"), Form("ebnf", 'root ::= "a"', "ebnf")
    assert constraint(ebnf, ToolUse(), form, 7) == dataclasses.replace(ebnf, starts_after=7)
    wanted = constraint(None, ToolUse((), FUNCTIONS, forced=True), form, 7)
    assert wanted.starts_after == 7
    call = FORMATS["hermes"].write([("ping", "{}")])
    assert door.takes(wanted, "\n\n" + call)
    assert door.takes(wanted, call)
    assert not door.takes(wanted, "hm</think>" + call)
    for prompt in ("no thoughts", "<think>\n\n</think>\n\n"):
        asked = Form("json_schema", {}, "x")
        assert constraint(asked, ToolUse(), answer_format(None, prompt), 7).starts_after == -1


def test_what_is_not_asked_for_costs_nothing():
    plain = answer_format(FORMATS["hermes"])
    loose = tuple(dataclasses.replace(function, strict=False) for function in FUNCTIONS)
    for name in ("llama3", "pythonic"):
        assert constraint(None, ToolUse((), loose), answer_format(FORMATS[name])) is None
    assert constraint(None, ToolUse(), answer_format(None, "<think>\n")) is None
    asked = Form("ebnf", 'root ::= "a"', "ebnf")
    assert constraint(asked, ToolUse(), plain) is asked


def test_strict_calls_in_python_are_refused():
    form = answer_format(FORMATS["pythonic"])
    with pytest.raises(RequestError, match="strict"):
        constraint(None, ToolUse((), FUNCTIONS), form)
    with pytest.raises(RequestError, match="do without `response_format`"):
        constraint(Form("json_schema", {}, "response_format"), ToolUse((), (PING,)), form)


@pytest.mark.parametrize("prompt", ["no thoughts", "<think>\n"])
def test_thoughts_may_speak_of_calls(door, prompt):
    form, write = answer_format(FORMATS["hermes"], prompt), FORMATS["hermes"].write
    wanted = constraint(None, ToolUse((), FUNCTIONS), form)
    begin = "<think>\n" if prompt == "no thoughts" else ""
    call = write([("ping", "{}")])
    assert door.takes(wanted, begin + f"a {form.calls.mark} no</think>\n\nHello")
    assert door.takes(wanted, begin + f"a {call}</think>\n\nSee: {call}")
    assert not door.takes(wanted, begin + f"a</think>\n\n{form.calls.mark} no")
    assert not door.takes(wanted, begin + "a")
    assert door.takes(wanted, "Hello " + call) == (prompt == "no thoughts")


def test_arguments_are_written_as_templates_write_them(door):
    """So that a call that comes back is the text that was sampled."""
    form = FORMATS["hermes"]
    arguments = {"city": "Oslo", "unit": "c"}
    for tools in (ToolUse((), FUNCTIONS, forced=True), ToolUse((), FUNCTIONS)):
        wanted = constraint(None, tools, answer_format(form))
        assert door.takes(wanted, form.write([("get_weather", json.dumps(arguments))]))
        assert door.takes(wanted, form.write([("any", json.dumps({"a": True, "b": False}))]))
        for separators, indent in (((",", ":"), None), ((", ", ": "), 1)):
            text = json.dumps(arguments, separators=separators, indent=indent)
            assert not door.takes(wanted, form.write([("get_weather", text)]))


def test_schemas_do_not_mix(door):
    """Two functions may define the same name differently."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}
    ones, twos = (
        Function(name, {**schema, "$defs": {"x": {"const": value}}}, strict=True)
        for name, value in (("one", 1), ("two", 2))
    )
    form = FORMATS["hermes"]
    wanted = constraint(None, ToolUse((), (ones, twos), forced=True), answer_format(form))
    for name, value in itertools.product(("one", "two"), (1, 2)):
        assert door.takes(wanted, form.write([(name, f'{{"x": {value}}}')])) == ((name == "one") == (value == 1))
