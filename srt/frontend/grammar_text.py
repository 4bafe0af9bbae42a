"""L1, frontend: each form of constraint as one text in llguidance's language: Lark with regular expressions, JSON
schemas and ids of special tokens in it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from srt.frontend.constraints import Form
from srt.schema_rules import GrammarError, rewrite

ANY_TEXT = r"/(.|\n)*/"

MAX_RULES = 300  # of EBNF: a second or two of the library's for the worst

_LARK = re.compile(r"%llguidance\b|start\s*:")
_LARK_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*[^\n:\"/|]*:", re.MULTILINE)
_BYTES = LLTokenizer("byte")


class GrammarTexts:
    """`special_tokens` are the texts of tokens that no text can be mistaken for, and their ids."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._special_in = re.compile("|".join(map(re.escape, names))) if names else None

    def of(self, form: Form) -> str:
        """GrammarError for a form that cannot be said."""
        match form.kind:
            case "json_schema":
                return json.dumps({"grammars": [{"json_schema": with_whitespace(form.value, form.whitespace)}]})
            case "regex":
                return LLMatcher.grammar_from_regex(form.value)
            case "ebnf":
                return _from_ebnf(form.value)
            case "choice":
                return "start: " + " | ".join(map(_quoted, form.value))
            case "structural_tag":
                return _StructuralTag(self, form.whitespace).text(form.value)
        raise AssertionError(form.kind)

    def literal(self, text: str) -> str:
        """A Lark expression for exactly this text; what are special tokens in it can only come as those."""
        if self._special_in is None:
            return _quoted(text)
        parts, end = [], 0
        for match in self._special_in.finditer(text):
            if match.start() > end:
                parts.append(_quoted(text[end : match.start()]))
            parts.append(f"<[{self._special[match[0]]}]>")
            end = match.end()
        if end < len(text) or not parts:
            parts.append(_quoted(text[end:]))
        return " ".join(parts)

    def starts_special(self, text: str) -> bool:
        return self._special_in is not None and self._special_in.match(text) is not None


def with_whitespace(schema: Any, whitespace: str | None) -> Any:
    """The schema in enforceable keywords, with the library's options in it."""
    if schema is False:
        raise GrammarError("the schema `false` allows no value")
    schema = rewrite({} if schema is True else schema, searcher)
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    if whitespace is None:
        options |= {"item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": options}


def searcher(pattern: str) -> Callable[[str], bool]:
    """As the library searches, whose work is bounded: that of Python's `re` grows without end for some patterns."""
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}), log_level=0)
    if matcher.is_error():
        raise GrammarError(f"{pattern[:100]!r} is no pattern that can be enforced")

    def is_found(text: str) -> bool:
        one, data = matcher.deep_copy(), list(json.dumps(text, ensure_ascii=False).encode())
        return one.try_consume_tokens(data) == len(data) and one.is_accepting()

    return is_found


def _from_ebnf(text: str) -> str:
    """GBNF becomes Lark, and Lark stays. The library tells them apart by a search that is slow where much is blank."""
    is_lark = any(_LARK.match(line.lstrip()) for line in text.splitlines())
    if (len(_LARK_RULE.findall(text)) if is_lark else text.count("::=")) > MAX_RULES:
        raise GrammarError(f"has more than {MAX_RULES} rules")
    if is_lark:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exceptions, too
        raise GrammarError(f"is no grammar: {error}") from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _StructuralTag:
    """Free text with structured parts in it, in SGLang's older form and in xgrammar's."""

    def __init__(self, texts: GrammarTexts, whitespace: str | None) -> None:
        self._texts = texts
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._numbers = itertools.count()

    def text(self, value: dict[str, Any]) -> str:
        if "structures" in value:
            value = {"format": _of_structures(value)}
        start = self._format(value.get("format"))
        return "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {ANY_TEXT}", *self._rules])

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{next(self._numbers)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _format(self, value: Any) -> str:
        """An expression, as a rule's name or in parentheses."""
        if not isinstance(value, dict):
            raise GrammarError("every format must be an object with a `type`")
        match value.get("type"):
            case "const_string":
                return f"({self._texts.literal(_string(value, 'value'))})"
            case "json_schema":
                return self._json(value.get("json_schema"))
            case "any_text":
                _only(value, "type")
                return "TEXT"
            case "regex":
                return self._rule(f"/{_slashed(_string(value, 'pattern'))}/")
            case "sequence":
                return self._rule(" ".join(self._followed(_list(value, "elements"))))
            case "or":
                return self._rule(" | ".join(map(self._format, _list(value, "elements"))))
            case "tag":
                return self._tag(value)
            case "triggered_tags":
                return self._triggered(value)
            case "tags_with_separator":
                return self._separated(value)
            case other:
                raise GrammarError(f"the format {str(other)[:40]!r} of a structural tag is not available")
        raise AssertionError

    def _followed(self, elements: Sequence[Any]) -> list[str]:
        """Free text ends where the literal behind it begins."""
        parts: list[str] = []
        for element in elements:
            parts.append(self._format(element))
            if len(parts) > 1 and parts[-2] == "TEXT":
                raise GrammarError("`any_text` may only be the last element of a sequence, or a tag's content")
        return parts

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise GrammarError("a `json_schema` must be an object")
        return self._rule(f"%json {json.dumps(with_whitespace(schema, self._whitespace), ensure_ascii=False)}")

    def _tag(self, value: Any, skip: str = "") -> str:
        """`skip` is what of the beginning the trigger has said."""
        if not isinstance(value, dict):
            raise GrammarError("a tag must be an object with `begin`, `content` and `end`")
        begin, end = _string(value, "begin").removeprefix(skip), _string(value, "end")
        content = value.get("content")
        head = f"{self._texts.literal(begin)} " if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text":
            return self._rule(head + self._text_until(end))
        tail = f" {self._texts.literal(end)}" if end else ""
        return self._rule(f"{head}{self._format(content)}{tail}")

    def _text_until(self, end: str, text: str = "TEXT") -> str:
        if not end:
            return text
        if self._texts.starts_special(end):
            return f"{text} {self._texts.literal(end)}"
        return self._rule(f"{text} {_quoted(end)}", lazy=True)

    def _text_without(self, excluded: Any) -> str:
        """A terminal: any text that has none of these in it."""
        if not excluded:
            return "TEXT"
        if not isinstance(excluded, list) or not all(isinstance(text, str) and text for text in excluded):
            raise GrammarError("`excludes` must be a list of texts")
        name = f"TEXT_{next(self._numbers)}"
        patterns = [f"~/(.|\\n)*{_slashed(re.escape(text))}(.|\\n)*/" for text in excluded]
        self._rules.append(f"{name}: {' & '.join([ANY_TEXT, *patterns])}")
        return name

    def _triggered(self, value: dict[str, Any]) -> str:
        _only(value, "type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        text = self._text_without(value.get("excludes"))
        tags, choices = _list(value, "tags"), []
        left = list(tags)
        for trigger in _list(value, "triggers"):
            if not isinstance(trigger, str) or not trigger:
                raise GrammarError("a trigger must be a text")
            mine = [tag for tag in left if isinstance(tag, dict) and str(tag.get("begin")).startswith(trigger)]
            left = [tag for tag in left if tag not in mine]
            if mine:
                bodies = " | ".join(self._tag(tag, trigger) for tag in mine)
                choices.append(self._rule(f"{self._text_until(trigger, text)} ({bodies})"))
        if left or not choices:
            raise GrammarError("every tag must begin with one of the triggers")
        any_tag = "(" + " | ".join(choices) + ")"
        if value.get("stop_after_first"):
            return self._rule(any_tag if value.get("at_least_one") else f"{any_tag} | {text}")
        return self._rule(f"{any_tag}{'+' if value.get('at_least_one') else '*'} {text}")

    def _separated(self, value: dict[str, Any]) -> str:
        _only(value, "type", "tags", "separator", "at_least_one", "stop_after_first")
        any_tag = self._rule(" | ".join(map(self._tag, _list(value, "tags"))))
        separator = _string(value, "separator")
        more = "" if value.get("stop_after_first") else f" ({self._texts.literal(separator)} {any_tag})*"
        return self._rule(f"{any_tag}{more}" if value.get("at_least_one") else f"({any_tag}{more})?")


def _of_structures(value: dict[str, Any]) -> dict[str, Any]:
    tags = []
    for structure in _list(value, "structures"):
        if not isinstance(structure, dict):
            raise GrammarError("a structure must be an object with `begin`, `schema` and `end`")
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end", "")})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _string(value: dict[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise GrammarError(f"`{key}` must be a text")
    return text


def _list(value: dict[str, Any], key: str) -> list[Any]:
    items = value.get(key)
    if not isinstance(items, list) or not items:
        raise GrammarError(f"`{key}` must be a list with something in it")
    return items


def _only(value: dict[str, Any], *known: str) -> None:
    for key, inner in value.items():
        if key not in known and inner not in (None, False, [], ""):
            raise GrammarError(f"`{key[:40]}` is not available in a structural tag")


def _slashed(pattern: str) -> str:
    """A regular expression between Lark's slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
