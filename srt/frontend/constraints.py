"""L1, frontend: what a client asks its output to be, in each of the forms there are, and the grammar made of it.

Owns the door's own copy of the grammar library, so that what cannot be enforced exactly is a 400 and never reaches a
scheduler. All of it works in a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from srt.frontend.errors import RequestError
from srt.frontend.protocol import OpenAIRequest, SamplingFields
from srt.messages import Grammar
from srt.schema_rules import GrammarError

ANY_JSON = "$$ANY$$"
"""SGLang's way to ask for JSON of any kind."""

WHITESPACE = r"[ ]|\n[ ]{0,7}"
"""Between JSON's tokens, unless the client says otherwise. Bounded: some models would write blanks for ever."""

MAX_TEXT = 256 * 1024  # bytes of a grammar
MAX_CHECKED = 256  # grammars whose check is remembered

_WHITESPACE_PATTERN = re.compile(r"(?:[ ()\[\]*+?|]|\\[nrts]|\{\d{1,3}(?:,\d{0,3})?\})*")


@dataclass(frozen=True)
class Form:
    """One constraint as a client wrote it.

    `value` is a schema (dict or bool) for `json_schema`, a text for `regex` and `ebnf`, a list of texts for `choice`,
    and SGLang's or xgrammar's object for `structural_tag`. Errors name `param`.
    """

    kind: str
    value: Any
    param: str
    whitespace: str | None = WHITESPACE  # a pattern; "" allows none; None: a blank after each comma and colon
    starts_after: int = -1  # the first token of this id is the last one that is free; -1: none is free


def form_of(request: SamplingFields) -> Form | None:
    """The one constraint of a request, whatever it is called. RequestError for several or for a misshapen one."""
    forms = [
        Form("regex", request.regex, "regex") if request.regex else None,
        Form("ebnf", request.ebnf, "ebnf") if request.ebnf else None,
        _json_schema(request.json_schema, "json_schema") if request.json_schema not in (None, "") else None,
        _structural_tag(request.structural_tag, "structural_tag") if request.structural_tag else None,
    ]
    whitespace = None
    if isinstance(request, OpenAIRequest):
        forms.append(_response_format(request.response_format))
        outputs, whitespace = _structured_outputs(request.structured_outputs)
        forms += outputs
    wanted = [form for form in forms if form is not None]
    if len(wanted) > 1:
        names = " and ".join(f"`{form.param}`" for form in wanted)
        raise RequestError(f"{names} exclude each other: an output has one constraint.", param=wanted[1].param)
    if not wanted:
        return None
    return wanted[0] if whitespace is None else replace(wanted[0], whitespace=whitespace)


def _response_format(value: dict[str, Any] | None) -> Form | None:
    param = "response_format"
    if value is None or value.get("type") == "text":
        return None
    match value.get("type"):
        case "json_object":
            return Form("json_schema", {"type": "object"}, param)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
                raise _fault(param, "of the type `json_schema` needs the schema as `json_schema.schema`")
            return Form("json_schema", described["schema"], param)
        case "structural_tag":
            return _structural_tag(value, param)
        case _:
            raise _fault(param, "needs a `type`: text, json_object, json_schema or structural_tag")


def _structured_outputs(value: dict[str, Any] | None) -> tuple[list[Form | None], str | None]:
    """vLLM's object: the constraints in it, and the pattern of white space if it has one."""
    param = "structured_outputs"
    forms: list[Form | None] = []
    whitespace = None
    for key, inner in (value or {}).items():
        name = f"{param}.{key}"
        if inner is None or inner is False:
            continue
        match key:
            case "json":
                forms.append(_json_schema(inner, name))
            case "json_object":
                forms.append(Form("json_schema", {"type": "object"}, name))
            case "regex":
                forms.append(Form("regex", _text(inner, name), name))
            case "grammar":
                forms.append(Form("ebnf", _text(inner, name), name))
            case "choice":
                if not isinstance(inner, list) or not inner or not all(isinstance(text, str) for text in inner):
                    raise _fault(name, "must be a list of texts")
                forms.append(Form("choice", inner, name))
            case "structural_tag":
                forms.append(_structural_tag(inner, name))
            case "whitespace_pattern":
                whitespace = _whitespace(inner, name)
            case "disable_any_whitespace":
                whitespace = ""
            case _:
                raise RequestError(f"Unknown field `{name}`", param=name, code="unknown_parameter")
    return forms, whitespace


def _json_schema(value: Any, param: str) -> Form:
    if value == ANY_JSON:
        return Form("json_schema", True, param)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _fault(param, f"is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise _fault(param, "must be a JSON schema: an object")
    return Form("json_schema", value, param)


def _structural_tag(value: Any, param: str) -> Form:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _fault(param, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _fault(param, "must be an object")
    return Form("structural_tag", value, param)


def _whitespace(value: Any, param: str) -> str:
    """JSON's four blanks and nothing else may come of it."""
    if not isinstance(value, str) or len(value) > 100 or not _WHITESPACE_PATTERN.fullmatch(value):
        raise _fault(param, r"takes a pattern of blanks, \n, \r and \t with [], (), |, ?, *, + and {m,n}")
    return value.replace(r"\s", r"[ \n\r\t]")


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise _fault(param, "must be a text")
    return value


def _fault(param: str, sentence: str) -> RequestError:
    return RequestError(f"`{param}` {sentence}.", param=param.partition(".")[0])


class Check(Protocol):
    """Makes grammars that the ranks will take of forms. GrammarError for others."""

    def __call__(self, form: Form) -> Grammar: ...

    def has_second(self, form: Form) -> bool:
        """Whether `second` may do what a call refused."""

    def second(self, form: Form) -> Grammar: ...


class Constraints:
    """Makes grammars of forms. Those that passed once are remembered by their content; equal ones are checked once."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="constraints")
        self._slow_threads = ThreadPoolExecutor(1, thread_name_prefix="slow constraints")
        self._checked: OrderedDict[bytes, Grammar] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Grammar]] = {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._slow_threads.shutdown(wait=False, cancel_futures=True)

    async def grammar(self, form: Form | None) -> Grammar | None:
        """RequestError for what cannot be enforced; it says why."""
        if form is None:
            return None
        try:
            key = msgspec.json.encode((form.kind, form.value, form.whitespace))
        except RecursionError:
            raise _fault(form.param, "is nested too deeply") from None
        if len(key) > MAX_TEXT:
            raise _fault(form.param, f"must not exceed {MAX_TEXT} bytes")
        grammar = self._checked.get(key)
        if grammar is None:
            if key not in self._under_way:
                self._under_way[key] = asyncio.create_task(self._checked_now(form))
                self._under_way[key].add_done_callback(lambda task: self._remember(key, task))
            try:  # who leaves takes nothing from others that wait for the same
                grammar = await asyncio.shield(self._under_way[key])
            except GrammarError as error:
                raise RequestError(f"`{form.param}`: {error}", param=form.param.partition(".")[0]) from None
        else:
            self._checked.move_to_end(key)
        return msgspec.structs.replace(grammar, starts_after=form.starts_after)

    def _remember(self, key: bytes, task: asyncio.Task[Grammar]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._checked[key] = task.result()
        if len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    async def _checked_now(self, form: Form) -> Grammar:
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self._threads, self._check, form)
        except GrammarError:
            if not self._check.has_second(form):
                raise
        return await run(self._slow_threads, self._check.second, form)
