"""What the engine is sent for each form of constraint, and what is refused at the door."""

import asyncio
import json
import threading

import pytest

from srt.frontend.constraints import Constraints, Form
from srt.messages import Grammar
from srt.schema_rules import GrammarError

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {"type": "object", "properties": {"b": {"enum": [1]}, "a": {"enum": [2]}}, "required": ["b", "a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def sent(server, path, body):
    server.engine.received.clear()
    server.ok(path, {"max_tokens": 2, **body})
    return server.engine.received[-1].grammar


def sent_native(server, **sampling):
    server.engine.received.clear()
    server.ok(GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 2, **sampling}})
    return server.engine.received[-1].grammar


def test_forms_of_one_constraint_make_one_grammar(server):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}
    of_chat = sent(server, CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": schema})
    assert of_chat == sent(server, COMPLETIONS, {"prompt": "a", "response_format": schema})
    assert of_chat == sent(server, COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": SCHEMA}})
    assert of_chat == sent(server, COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": json.dumps(SCHEMA)}})
    assert of_chat == sent_native(server, json_schema=json.dumps(SCHEMA))
    assert of_chat == sent_native(server, json_schema=SCHEMA)
    assert of_chat.text.index('"b"') < of_chat.text.index('"a"'), "properties keep their order"
    assert of_chat.starts_after == -1
    regex = sent_native(server, regex="[ab]+")
    assert regex == sent(server, COMPLETIONS, {"prompt": "a", "regex": "[ab]+"})
    assert regex == sent(server, COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "[ab]+"}})
    ebnf = sent_native(server, ebnf='root ::= "a" | "b"')
    assert ebnf == sent(server, COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": 'root ::= "a" | "b"'}})
    tag = sent_native(server, structural_tag=json.dumps(TAG))
    assert tag == sent(server, COMPLETIONS, {"prompt": "a", "response_format": TAG})


@pytest.mark.parametrize("unset", [{}, {"regex": ""}, {"regex": None, "json_schema": "", "ebnf": "", "n": 1}])
def test_empty_is_none(server, unset):
    assert sent_native(server, **unset) is None
    assert sent(server, COMPLETIONS, {"prompt": "a", **unset, "response_format": {"type": "text"}}) is None


def test_white_space_is_bounded_unless_the_client_says_otherwise(server):
    def options(**outputs):
        grammar = sent(server, COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {}, **outputs}})
        return json.loads(grammar.text)["grammars"][0]["json_schema"]["x-guidance"]

    assert options()["whitespace_pattern"] == r"[ ]|\n[ ]{0,7}"
    assert options(whitespace_pattern=r"\s{1,3}")["whitespace_pattern"] == r"[ \n\r\t]{1,3}"
    assert options(disable_any_whitespace=True) == {"whitespace_flexible": False}
    assert options(disable_any_whitespace=False) == options()


def test_prompts_of_one_request_may_have_their_own(server):
    body = {"text": ["a", "b", "c"], "sampling_params": [{"regex": "a"}, {}, {"regex": "b"}]}
    server.engine.received.clear()
    server.ok(GENERATE, body)
    grammars = [message.grammar and message.grammar.text for message in server.engine.received]
    assert ["/a/" in (grammars[0] or ""), grammars[1], "/b/" in (grammars[2] or "")] == [True, None, True]


CONFLICTS = [
    {"regex": "a", "ebnf": 'root ::= "a"'},
    {"regex": "a", "response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"json_object": True}, "json_schema": "{}"},
]


@pytest.mark.parametrize("body", CONFLICTS)
def test_an_output_has_one_constraint(server, body):
    status, answer = server.post(COMPLETIONS, {"prompt": "a", **body})
    assert status == 400
    assert "exclude each other" in answer["error"]["message"]


@pytest.mark.parametrize("depth", [60, 900, 3000])
def test_a_deep_schema_is_refused_and_the_server_goes_on(server, depth):
    for schema in ('{"items":' * depth + "{}" + "}" * depth, '{"default":' * depth + "{}" + "}" * depth):
        for body in (
            b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": %b}}}'
            % schema.encode(),
            json.dumps({"prompt": "a", "json_schema": schema}).encode(),
        ):
            status, _, raw = server.request("POST", COMPLETIONS, body)
            assert status == 400 or (status == 200 and "default" in schema), raw
    server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1})


def test_a_large_schema_is_refused(server):
    schema = {"enum": [f"{index:060}" for index in range(5000)]}
    status, answer = server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": schema}})
    assert status == 400
    assert "262144 bytes" in answer["error"]["message"]


def test_a_number_of_a_schema_may_be_of_any_size(server):
    grammar = sent_native(server, json_schema={"enum": [10**30]})
    assert str(10**30) in grammar.text


class CountingCheck:
    """Its first check waits until it is told to go on."""

    def __init__(self):
        self.count, self.go_on = 0, threading.Event()

    def __call__(self, form):
        self.count += 1
        self.go_on.wait(30)
        if form.value == "bad":
            raise GrammarError("it is bad")
        return Grammar("llguidance", form.value)

    def has_second(self, form):
        return False


def test_equal_forms_are_checked_once_whoever_leaves_meanwhile():
    async def ask(value):
        check = CountingCheck()
        constraints = Constraints(check)
        asking = [asyncio.create_task(constraints.grammar(Form("regex", value, f"p{i}"))) for i in range(4)]
        await asyncio.sleep(0)
        asking[0].cancel()
        check.go_on.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        answers.append(
            (await asyncio.gather(constraints.grammar(Form("regex", value, "p")), return_exceptions=True))[0]
        )
        constraints.close()
        return answers[1:], check.count

    answers, count = asyncio.run(ask("a"))
    assert answers == [Grammar("llguidance", "a")] * 4
    assert count == 1
    answers, count = asyncio.run(ask("bad"))
    assert [str(error) for error in answers] == [f"`{name}`: it is bad" for name in ("p1", "p2", "p3", "p")]
    assert count == 2, "what is refused is not remembered"
