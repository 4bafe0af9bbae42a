"""Shared, frontend: a chat's messages to the text that the model reads. No torch, no transformers.

The dialect is the one that templates are written for: Jinja with blocks that eat the line around them, loop controls,
`raise_exception`, `strftime_now` and a `tojson` that leaves text as it is. Templates come with the model and run in a
sandbox; messages come from clients and are only data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from srt.model_config import ModelError
from srt.model_files import read_optional_json

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
RESERVED += ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
"""Names that a client's own template arguments may not take: what we set, and transformers' own."""

_CONTINUE_MARK = "[[the last message goes on here]] "
"""Ends in a space, so that its absence shows that the template trims what it prints."""


class TemplateError(Exception):
    """The client's messages do not fit the template; one sentence says why."""


class ChatTemplate:
    """One model's template, with the special tokens that it may name."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` has "default", and perhaps "tool_use". Raises ModelError for a template that does not compile."""
        environment = _environment()
        self.source = "\n".join(sources.values())
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            named = [meta.find_undeclared_variables(environment.parse(source)) for source in sources.values()]
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        for template in self._templates.values():
            template.globals = dict(template.globals)  # a ChainMap takes long to be copied for each prompt
        self.takes_tools = any("tools" in names for names in named)

    @classmethod
    def from_folder(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """The template of a model's (tokenizer) folder, or of the file `override`; None if the model has none."""
        config = read_optional_json(folder / "tokenizer_config.json")
        sources = _sources(folder, config) if override is None else {"default": read_template(override)}
        return cls(sources, _special_tokens(config)) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """The prompt. `continue_final_message` ends it inside the last message, so that the model goes on with it.

        `arguments` are the client's own (`enable_thinking` and the like). Raises TemplateError.
        """
        taken = [name for name in arguments if name in RESERVED or name in self._special_tokens]
        if taken:
            raise TemplateError(f"chat_template_kwargs may not set {', '.join(taken)}")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        if not messages:
            raise TemplateError("messages must not be empty")
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        text = self._render(
            template,
            {
                **self._special_tokens,
                **arguments,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_mark(text) if continue_final_message else text

    @staticmethod
    def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return template.render(variables)
        except TemplateError:
            raise
        except Exception as error:  # templates fail in any way on messages that they were not written for
            raise TemplateError(
                f"the model's chat template cannot take these messages: {type(error).__name__}: {error}"
            ) from error


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"the chat template {path} cannot be read: {reason}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are printed like any others."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter is meant for HTML and would escape `<`, `>`, `&` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own goes before tokenizer_config.json's entry, which is one template or a list of named ones."""
    if (folder / "chat_template.jinja").exists():
        extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {"default": folder / "chat_template.jinja", **{path.stem: path for path in extra}}
        return {name: read_template(path) for name, path in files.items()}
    template = config.get("chat_template")
    if template is None:
        template = read_optional_json(folder / "chat_template.json").get("chat_template")
    if not template:
        return {}
    try:
        named = {"default": template} if isinstance(template, str) else {e["name"]: e["template"] for e in template}
    except (KeyError, TypeError):
        named = {"default": None}
    if not all(isinstance(text, str) for text in named.values()):
        raise ModelError(f"{folder}: chat_template must be a text or a list of named ones")
    return named if "default" in named else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind: strings, or objects with `content`."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the message whose text ends in the mark."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + _CONTINUE_MARK}
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and content[-1].get("text"):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]}
    raise TemplateError("continue_final_message needs a last message that ends in text")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise TemplateError("continue_final_message: the model's chat template does not print the last message")
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()
