"""What the parsers make of a text does not depend on how it is cut, and nothing of it is lost."""

import ast
import json
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from srt.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from srt.frontend.parsing import reasoning, tool_calls
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.json_reader import ValueReader
from srt.frontend.parsing.pieces import Arguments, CallStart, Content, Reasoning
from srt.frontend.parsing.reasoning import count_tokens

NAMES = ("get_weather", "f", "g.h")

WHOLE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": ARGS}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": ARGS}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": ARGS}]',
    "pythonic": "[f(ARGS)]",
}


def read(form, parts):
    """(reasoning, content, [(name, arguments)], whole calls and no others) of an answer that comes in `parts`."""
    parser = form.parser()
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    calls = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            assert piece.text
    joined = ["".join(piece.text for piece in pieces if isinstance(piece, kind)) for kind in (Reasoning, Content)]
    return *joined, calls, parser.called


def form_of(calls=None, thoughts=None, prompt="", **options):
    return AnswerFormat(
        prompt,
        reasoning.FORMATS[thoughts] if thoughts else None,
        calls=tool_calls.FORMATS[calls] if calls else None,
        names=NAMES,
        **options,
    )


def cuts(text, at):
    bounds = [0, *sorted(index % (len(text) + 1) for index in at), len(text)]
    return [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


# Texts made of what matters: marks whole and in part, calls right and wrong, and whatever else.
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "<", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>"),
        *("<|python_start|>", "<|python_end|>"),
        *("<think>", "</think>", "</thi", "\n", "\n\n", "  ", "{", "}", "[", "]", ",", ";", '"', "\\"),
        *('{"name": "f", "arguments": {}}', '{"name":"g.h","parameters":{"a":{"b":["}",null,-1.5e3,true]}}}'),
        *('{"arguments": {"city": "Oslo \\"}{\\" \\u00e9 é 🌊"}, "name": "get_weather"}', '{"name": "f"}'),
        *('{"name": "unknown", "arguments": {}}', '{"name": "f", "arguments": [1]}', '{"name": "f", "argum'),
        *('{"name": "f", "arguments": {"a": 01}}', '{"name": "f", "arguments": "{}"}', '{"name": 5}', "prose, "),
        *("f(", "f()", "g.h(a=1, b='it\\'s', c=[True, None, {'k': -2.5}])", ')', "'", "f(1)", "unknown()", "f(x=y)"),
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=12).map("".join)
FORMS = st.builds(
    form_of,
    st.sampled_from([None, "hermes", "llama3", "mistral", "pythonic"]),
    st.sampled_from([None, "qwen3", "deepseek-r1"]),
    st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
    max_calls=st.sampled_from([None, 1]),
    constrained=st.booleans(),
    stream_reasoning=st.booleans(),
    separate_reasoning=st.booleans(),
)


@hypothesis.given(form=FORMS, text=TEXTS, at=st.lists(st.integers(0, 1000), max_size=6))
@hypothesis.settings(max_examples=200)
def test_how_a_text_is_cut_makes_no_difference(form, text, at):
    whole = read(form, [text])
    assert read(form, cuts(text, at)) == whole
    assert read(form, list(text)) == whole
    for name, arguments in whole[2]:
        assert name in NAMES
        if not form.constrained:
            assert isinstance(json.loads(arguments), dict)
    assert form.max_calls is None or len(whole[2]) <= 1


@hypothesis.given(calls=st.sampled_from([None, *WHOLE]), text=TEXTS)
@hypothesis.settings(max_examples=100)
def test_without_a_call_every_character_is_content(calls, text):
    _, content, found, called = read(form_of(calls), [text])
    if not found:
        assert content == text
        assert not called


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=4)


@hypothesis.given(
    value=JSON, ascii=st.booleans(), indent=st.sampled_from([None, 1]), tail=st.sampled_from(["", "}", " x"])
)
def test_the_reader_takes_what_is_json(value, ascii, indent, tail):
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    reader = ValueReader()
    end = reader.feed(text, 0)
    if reader.done:
        assert end == len(text)
    else:  # a number may go on until something else comes
        assert not reader.failed
        assert reader.feed(tail or ",", 0) == 0
    assert reader.done


@hypothesis.given(text=st.text('{}[]",:\\ \nabtrunlfse0123456789.-+eEu', max_size=12))
@hypothesis.settings(max_examples=300)
def test_the_reader_takes_nothing_else(text):
    def refuse(word):
        raise ValueError(word)

    reader = ValueReader()
    end = reader.feed(text + " ", 0)
    if reader.done:
        json.loads(text[:end], parse_constant=refuse)
    else:
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@hypothesis.given(arguments=st.lists(OBJECTS, min_size=1, max_size=3), constrained=st.booleans(), compact=st.booleans())
@hypothesis.settings(max_examples=25)
def test_calls_come_back_to_the_letter(name, arguments, constrained, compact):
    separators = (",", ":") if compact else None
    texts = [json.dumps(one, ensure_ascii=False, separators=separators) for one in arguments]
    calls = list(zip(["f", "g.h", "get_weather"], texts, strict=False))
    text = tool_calls.FORMATS[name].write(calls)
    form = form_of(name, constrained=constrained)
    assert read(form, [text]) == ("", "", calls, True)
    assert read(form, list(text)) == ("", "", calls, True)


@hypothesis.given(arguments=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), JSON, max_size=3))
@hypothesis.settings(max_examples=40)
def test_python_calls_become_json(arguments):
    keywords = ", ".join(f"p_{name}={value!r}" for name, value in arguments.items())
    _, content, calls, called = read(form_of("pythonic"), list(f"[f({keywords}), g.h()]"))
    assert (content, called) == ("", True)
    assert [name for name, _ in calls] == ["f", "g.h"]
    assert json.loads(calls[0][1]) == {f"p_{name}": ast.literal_eval(repr(one)) for name, one in arguments.items()}
    assert calls[1][1] == "{}"


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1,}',
        "{'a': 1}",
        "[1]",
        '"{}"',
        "null",
        '{"a": NaN}',
        '{"a": "\n"}',
        '{"a": "\\x"}',
        '{"a"}',
        "{",
        "a=b",
        "*a",
    ],
)
def test_what_is_malformed_is_content(name, arguments):
    text = "\n " * (name != "pythonic") + WHOLE[name].replace("ARGS", arguments) + "\n"
    assert read(form_of(name), list(text)) == ("", text, [], False)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Let me see.\n\n<tool_call>{"name": "f"}</tool_call>\n', "Let me see.", [("f", "{}")]),
        ("hermes", '\n<tool_call>{"name": "f"}</tool_call>\nDone', "Done", [("f", "{}")]),
        ("hermes", 'A <tool_call>{"name": "f"}</tool_call>\nB', "A \nB", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "f"}</tool_call>', "", [("f", "{}")] * 2),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "f"}]</tool_call>', "", [("f", "{}")] * 2),
        ("hermes", '<tool_call>{"name": "f"}', "", [("f", "{}")]),
        ("hermes", '<tool_call>no<tool_call>{"name": "f"}</tool_call>', "<tool_call>no", [("f", "{}")]),
        ("hermes", '{"name": "f"}', '{"name": "f"}', []),
        ("llama3", '<|python_tag|>{"name": "f"}; {"name": "f"}', "", [("f", "{}")] * 2),
        ("llama3", '[{"name": "f"}]', '[{"name": "f"}]', []),
        ("llama3", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
        ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ("mistral", 'So: [TOOL_CALLS][{"name": "f"}]', "So:", [("f", "{}")]),
        ("pythonic", "<|python_start|>[f(a='x')]<|python_end|>", "", [("f", '{"a": "x"}')]),
        ("pythonic", "[f(a=true, b=null)]", "", [("f", '{"a": true, "b": null}')]),
        ("pythonic", "[f(a='\\ud800')]", "[f(a='\\ud800')]", []),
        ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
        ("pythonic", "[1] says f()", "[1] says f()", []),
        ("pythonic", "[f(), oops", ", oops", [("f", "{}")]),
    ],
)  # fmt: skip
def test_calls_among_text(name, text, content, calls):
    assert read(form_of(name), list(text)) == ("", content, calls, bool(calls))


def test_a_call_that_a_grammar_holds_to_its_form_is_given_away_as_it_comes():
    parser = form_of("hermes", constrained=True).parser()
    seen = [parser.feed(part) for part in ('<tool_call>{"name": "f", ', '"arguments": {"a', '": 1', "}}")]
    assert seen == [
        [], [CallStart(0, "f"), Arguments(0, '{"a')], [Arguments(0, '": 1')], [Arguments(0, "}")]
    ]  # fmt: skip
    assert parser.called


def test_of_a_call_that_was_cut_its_beginning_stays():
    text = '<tool_call>{"name": "f", "arguments": {"a'
    assert read(form_of("hermes", constrained=True), list(text)) == ("", "", [("f", '{"a')], False)
    assert read(form_of("hermes"), list(text)) == ("", text, [], False)


def test_no_more_calls_than_wanted():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    found = read(form_of("hermes", max_calls=1), list(text))
    assert found == ("", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], True)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thought", "content"),
    [
        ("qwen3", "", "<think>\nhm\n\nso\n</think>\n\nHi\n", "hm\n\nso", "Hi\n"),
        ("qwen3", "<think>\n", "hm\n</think>\n\nHi", "hm", "Hi"),
        ("qwen3", "<think>\n\n</think>\n\n", "Hi", "", "Hi"),
        ("qwen3", "", "Hi <think>no</think>", "", "Hi <think>no</think>"),
        ("qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("qwen3", "", "\n<thi", "", "\n<thi"),
        ("qwen3", "<think>", "cut </thi", "cut </thi", ""),
        ("deepseek-r1", "", "hm</think>Hi", "hm", "Hi"),
        ("deepseek-r1", "", "<think>hm</think>    Hi </think>", "hm", "    Hi </think>"),
        ("deepseek-r1", "</think>", "Hi", "", "Hi"),
    ],
)
def test_reasoning(name, prompt, text, thought, content):
    assert read(form_of(None, name, prompt), list(text)) == (thought, content, [], False)


def test_reasoning_is_no_place_for_calls():
    text = '<think><tool_call>{"name": "f"}</tool_call></think>\n\n<tool_call>{"name": "g.h"}</tool_call>'
    found = read(form_of("hermes", "qwen3"), list(text))
    assert found == ('<tool_call>{"name": "f"}</tool_call>', "", [("g.h", "{}")], True)
    left_in = read(form_of("hermes", "qwen3", separate_reasoning=False), list(text))
    assert left_in == ("", '<think><tool_call>{"name": "f"}</tool_call></think>', [("g.h", "{}")], True)


@pytest.mark.parametrize(("prompt", "head"), [("", "\n<think>\nhm\n</think>"), ("<think>", "hm\n</think>")])
def test_reasoning_that_stays_in_the_content_stays_to_the_letter(prompt, head):
    form = form_of("llama3", "qwen3", prompt, separate_reasoning=False)
    assert read(form, list(head + "\n\nHi\n")) == ("", head + "\n\nHi\n", [], False)
    assert read(form, list(head + '\n\n{"name": "f"}')) == ("", head, [("f", "{}")], True)


def test_reasoning_in_one_piece_or_not_at_all():
    text = "<think>a b c</think>Hi"
    parser = form_of(None, "qwen3", stream_reasoning=False).parser()
    pieces = [parser.feed(char) for char in text]
    assert [piece for some in pieces for piece in some][0] == Reasoning("a b c")
    assert read(form_of(None, "qwen3", stream_reasoning=False), list(text[:-12])) == ("a b", "", [], False)
    assert read(form_of(None, "qwen3", show_reasoning=False), list(text)) == ("", "Hi", [], False)
    assert read(form_of(None, "qwen3", separate_reasoning=False), list(text)) == ("", text, [], False)


@pytest.mark.parametrize(
    ("prompt", "pieces", "count"),
    [
        ("", ["<think>", "hm", "</think>", "\n\n", "Hi"], 3),
        ("", ["<", "think>h", "m</th", "ink>Hi", " you"], 4),
        ("<think>\n", ["hm", "</think>", "Hi"], 2),
        ("<think>\n", ["hm", "hm"], 2),
        ("", ["Hi", "</think>"], 0),
    ],
)
def test_tokens_of_reasoning(prompt, pieces, count):
    assert count_tokens(reasoning.FORMATS["qwen3"], prompt, [piece.encode() for piece in pieces]) == count


def test_the_flags_name_the_formats():
    assert set(TOOL_CALL_PARSERS) == {"auto", *tool_calls.FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *reasoning.FORMATS}


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        (r"return <tool_call>\n{\"name\": NAME, \"arguments\": ARGS}</tool_call>", "hermes", None),
        ("{{ '<think>' }}{{ x.split('</think>') }}<tool_call>{{ call.arguments | tojson }}", "hermes", "qwen3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3", None),
        ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[/THINK]", None, "magistral"),
        ("answer with [func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<tool_call><function=f> arguments", None, None),
        ("<tool_call>{{ name }}<arg_key> arguments </think>", None, "qwen3"),
        ("{{ message.content }}", None, None),
    ],
)
def test_what_a_template_says_of_its_model(template, calls, thoughts):
    assert (tool_calls.detect(template), reasoning.detect(template)) == (calls, thoughts)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_long_answers_are_read_in_linear_time(name):
    """Half-open calls, white space and names without end: seconds where time grows with the square."""
    for unit in ('<tool_call>{"a":"', "[[", " ", "f", "[TOOL_CALLS]", '{"name": "f", "arguments": {"a": ', "\n<"):
        parser, began = form_of(name, "qwen3", "<think></think>").parser(), time.process_time()
        for _ in range(20_000):
            parser.feed(unit)
        parser.finish()
        assert time.process_time() - began < 5


@pytest.mark.slow
def test_long_reasoning_that_is_held_back_is_read_in_linear_time():
    parser, began = form_of(None, "qwen3", "<think>", stream_reasoning=False).parser(), time.process_time()
    for _ in range(40_000):
        parser.feed(" x")
    assert parser.finish() == [Reasoning(" x" * 40_000)]
    assert time.process_time() - began < 5
