"""L1, frontend: /openapi.json, made of the protocol's types, and /docs, which is the same to read."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

import srt
from srt.config import ServerConfig
from srt.frontend.answers import Answer, json_response, text_response
from srt.frontend.routes import HTML, Route

ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
    "required": ["error"],
}
_REF = "#/components/schemas/"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; } code, th, td { font: 14px/1.4 ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } td, th { padding: .1rem 1.5rem .1rem 0; text-align: left; }
b { display: inline-block; min-width: 6rem; } i { color: #666; font-style: normal; }
"""


class Description:
    """Both pages, written once. The routes to them are among those that they describe."""

    def __init__(self, routes: Sequence[Route], config: ServerConfig) -> None:
        self.routes = [
            *routes,
            Route("GET", "/openapi.json", self.json, "This description", open=True),
            Route("GET", "/docs", self.docs, "The same to read", answer=HTML, open=True),
        ]
        self._document = document(self.routes, config)
        self._page = page(self._document)

    async def json(self, request: web.Request) -> Answer:
        return json_response(self._document)

    async def docs(self, request: web.Request) -> Answer:
        return text_response(self._page, "text/html")


def document(routes: Sequence[Route], config: ServerConfig) -> dict[str, Any]:
    """OpenAPI 3.1."""
    users, administrators = bool(config.api_keys), bool(config.api_keys or config.admin_api_key)
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REF + "{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in route.methods.split():
            paths.setdefault(route.shown_path, {})[method.lower()] = operation = _operation(route, method, schema_of)
            if not route.open and (administrators if route.admin else users):
                operation["security"] = [{"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": srt.__version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, method: str, schema_of: dict[type, Any]) -> dict[str, Any]:
    kinds = list(route.answer)
    if route.streams:
        kinds.append("text/event-stream")
    error = {"application/json": {"schema": {"$ref": f"{_REF}Error"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.tag],
        "operationId": f"{method.lower()}{route.shown_path.translate(str.maketrans('/{}.', '____'))}",
        "responses": {
            "200": {"description": "As asked", "content": {kind: {} for kind in kinds}},
            "default": {"description": "Why not", "content": error},
        },
    }
    parameters = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        for _ in range("{id}" in route.shown_path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "number"}} for name, text in route.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None and method != "GET":
        operation["requestBody"] = {
            "required": not route.admin, "content": {"application/json": {"schema": schema_of[route.body]}}
        }  # fmt: skip
    return operation


def page(described: dict[str, Any]) -> str:
    """For readers; it loads nothing."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Lockstep</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>Lockstep {html.escape(described['info']['version'])}</h1>")
    parts.append('<p>The same for machines: <a href="openapi.json">openapi.json</a>.</p>')
    tag = None
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                parts.append(f"<h2>{html.escape(tag[0].upper() + tag[1:])}</h2>")
            head = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> — {html.escape(operation['summary'])}"
            body = operation.get("requestBody")
            if body is None:
                parts.append(f"<div>{head}</div>")
            else:
                name = body["content"]["application/json"]["schema"]["$ref"].removeprefix(_REF)
                rows = "".join(_rows(described["components"]["schemas"][name]))
                parts.append(f"<details><summary>{head}</summary><table>{rows}</table></details>")
    return "\n".join(parts)


def _rows(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, member in schema.get("properties", {}).items():
        note = "required" if name in required else ""
        yield f"<tr><td>{html.escape(name)}<td>{html.escape(_kind(member))}<td><i>{note}</i></tr>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_REF)
    if "anyOf" in schema:
        return " | ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_kind(schema['items'])}"
    return str(kind)
