"""L1, frontend: the one constraint of a chat answer, made of what the client asks, the tools and the reasoning.

It is said as a structural tag: free text, literals and JSON schemas in a row, each schema a document of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from srt.frontend.constraints import Form
from srt.frontend.errors import RequestError
from srt.frontend.openai.tools import Function, ToolUse
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.reasoning import begins_inside
from srt.frontend.parsing.tool_calls import CallFormat, JsonFormat

_JSON_OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
_LINE_ENDS = {"type": "regex", "pattern": r"\n{0,2}"}
_SHAPES = ("patternProperties", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "unevaluatedProperties")
"""Keywords by which an object may have more members than its `properties`."""


def constraint(asked: Form | None, tools: ToolUse, answer: AnswerFormat, end_token: int | None = None) -> Form | None:
    """RequestError for what excludes each other or cannot be enforced. `end_token` is the mark that ends reasoning."""
    form = _with_calls(asked, tools, answer)
    if form is None or answer.reasoning is None:
        return form
    return _after_reasoning(form, answer, end_token)


def _with_calls(asked: Form | None, tools: ToolUse, answer: AnswerFormat) -> Form | None:
    if tools.forced and asked is not None:
        raise RequestError(f"`tool_choice` asks for a call, so `{asked.param}` cannot be met.", param=asked.param)
    calls = answer.calls
    if not tools.callable:
        return asked
    strict = any(function.strict for function in tools.callable)
    if not (tools.forced or strict or asked is not None) and not _is_marked(calls):
        return None
    if not isinstance(calls, JsonFormat):
        culprit = "`strict`" if asked is None else f"`{asked.param}`"
        raise RequestError(
            f"No grammar tells calls in this model's form from other answers; do without {culprit}.", param="tools"
        )
    if tools.forced:
        return _tag(_calls(calls, tools), "tools")
    if asked is not None:
        # Without its mark a call would begin as other JSON does.
        marked = _sequence(_literal(calls.mark if calls.bare else ""), _calls(calls, tools))
        return _tag(_either(_format_of(asked), marked), asked.param, asked.whitespace)
    thoughts = answer.reasoning
    return _tag(_calls_in_text(calls, tools, [thoughts.begin] if thoughts is not None else []), "tools")


def _is_marked(calls: CallFormat) -> bool:
    """Whether calls begin with what hardly any text has, so that text stays free next to them."""
    return isinstance(calls, JsonFormat) and not calls.bare


def _calls(form: JsonFormat, tools: ToolUse) -> dict[str, Any]:
    """At least one call and nothing else."""
    return _sequence(_literal(form.begin), _row_of_calls(form, tools), _literal(form.end))


def _row_of_calls(form: JsonFormat, tools: ToolUse) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": _call_tags(form, tools),
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": tools.max_calls == 1,
    }


def _calls_in_text(form: JsonFormat, tools: ToolUse, excludes: list[str]) -> dict[str, Any]:
    """Anything, but what begins as a call goes on as one.

    The text may not have the mark that opens reasoning: or else reasoning would be such text, and no place to speak of
    calls.
    """
    if form.bare:
        other = rf"(\s*[^\s\{form.bare}](.|\n)*)?"
        return _either({"type": "regex", "pattern": other}, _calls(form, tools))
    tags = _call_tags(form, tools, form.mark)
    if form.begin:  # all calls stand together
        tags = [{"type": "tag", "begin": form.begin, "content": _row_of_calls(form, tools), "end": form.end}]
    return {
        "type": "triggered_tags",
        "triggers": [form.mark],
        "tags": tags,
        "stop_after_first": bool(form.begin) or tools.max_calls == 1,
        "excludes": excludes,
    }


def _call_tags(form: JsonFormat, tools: ToolUse, begin: str = "") -> list[dict[str, Any]]:
    """One for each function whose schema counts, and one for all others, whose arguments may be any object.

    All begin with `begin`. What follows it is one literal up to the arguments: of two literals neither may begin the
    other, or the grammar library would read on for the longer.
    """
    tags, others = [], []
    for function in tools.callable:
        head = form.head(function.name)
        if tools.forced or function.strict:
            content = {"type": "json_schema", "json_schema": _arguments(function)}
            tags.append({"type": "tag", "begin": head, "content": content, "end": form.tail})
        else:
            others.append(_literal(head.removeprefix(begin)))
    if others:
        content = _sequence(_either(*others), _JSON_OBJECT)
        tags.append({"type": "tag", "begin": begin, "content": content, "end": form.tail})
    return tags


def _arguments(function: Function) -> dict[str, Any]:
    schema = {**function.parameters, "type": "object"}
    if not any(name in schema for name in _SHAPES):  # a function has no other parameters than it lists
        schema.setdefault("additionalProperties", False)
    return schema


def _after_reasoning(form: Form, answer: AnswerFormat, end_token: int | None) -> Form:
    """The same for an answer that may think first, and that must where the prompt has begun to."""
    marks = answer.reasoning
    must = begins_inside(marks, answer.prompt)
    if answer.prompt.rstrip().endswith(marks.end) or not (must or _is_part(form)):
        return form
    if must and end_token is not None:
        if _is_part(form):
            form = _tag(_sequence(_LINE_ENDS, _format_of(form)), form.param, form.whitespace)
        return dataclasses.replace(form, starts_after=end_token)
    rest = _sequence({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marks.end}, _LINE_ENDS)
    if not must:
        rest = _either(_literal(""), _sequence(_literal(marks.begin), rest))
    return _tag(_sequence(rest, _format_of(form)), form.param, form.whitespace)


def _is_part(form: Form) -> bool:
    """Whether more can be put around it."""
    return form.kind != "ebnf" and (form.kind != "structural_tag" or isinstance(form.value.get("format"), dict))


def _format_of(form: Form) -> dict[str, Any]:
    if not _is_part(form):
        raise RequestError(
            f"`{form.param}` goes neither with tools nor with reasoning; use a JSON schema, a regex, or a structural "
            "tag with `format`.",
            param=form.param.partition(".")[0],
        )
    match form.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": form.value}
        case "regex":
            return {"type": "regex", "pattern": form.value}
        case "choice":
            return _either(*map(_literal, form.value))
        case "structural_tag":
            return form.value["format"]
    raise AssertionError(form.kind)


def _tag(value: dict[str, Any], param: str, whitespace: str | None = None) -> Form:
    """White space is what chat templates write, so that the calls of past turns are found in the cache."""
    return Form("structural_tag", {"type": "structural_tag", "format": value}, param, whitespace)


def _literal(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    said = [element for element in elements if element != _literal("")]
    return said[0] if len(said) == 1 else {"type": "sequence", "elements": said}


def _either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}
