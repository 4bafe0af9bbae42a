"""The description of the routes is whole, and what it says of bodies is what the server takes."""

import json
import re

import jsonschema
import pytest
from frontend_harness import MODEL, Server

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": [{"messages": HI}, {"messages": HI, "n": 2, "stop": ["x"], "user": None}],
    "/v1/completions": [{"prompt": "a"}, {"prompt": [[97], [98]], "max_tokens": 1, "echo": True}],
    "/v1/messages": [{"messages": HI, "max_tokens": 3, "system": [{"type": "text", "text": "x"}]}],
    "/v1/responses": [{"input": "a", "max_output_tokens": 3}, {"input": [{"role": "user", "content": "x"}]}],
    "/generate": [{"text": "a"}, {"input_ids": [97], "sampling_params": {"max_new_tokens": 2}, "rid": None}],
    "/tokenize": [{"prompt": "a"}],
    "/detokenize": [{"tokens": [97]}],
    "/pause_generation": [{"mode": "retract"}],
    "/configure_logging": [{"log_requests": False}],
}
WRONG = {
    "/v1/chat/completions": [{}, {"messages": "hi"}, {"messages": HI, "n": "two"}, {"messages": HI, "nonsense": 1}],
    "/v1/completions": [{"prompt": 5}, {"prompt": "a", "max_tokens": "many"}],
    "/generate": [{"text": 5}, {"input_ids": "a"}, {"text": "a", "sampling_params": {"nonsense": 1}}],
    "/pause_generation": [{"mode": "gently"}],
}


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json")[1]


def schema_at(document, path):
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**body, "components": document["components"]}


def test_every_route_is_there(server, document):
    assert len(document["paths"]) > 30
    for path, methods in document["paths"].items():
        status, headers, _ = server.request("PATCH", path.replace("{id}", "x"))
        assert status == 405
        assert set(headers["Allow"].lower().split(",")) - {"head"} == set(methods)


def test_references_and_schemas_are_whole(document):
    text = json.dumps(document)
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', text)):
        jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][name])
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", BODIES)
def test_what_is_described_is_taken(server, document, path):
    for body in BODIES[path]:
        jsonschema.validate(body, schema_at(document, path))
        assert server.request("POST", path, body)[0] == 200


@pytest.mark.parametrize("path", WRONG)
def test_what_is_not_described_is_refused(server, document, path):
    for body in WRONG[path]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body, schema_at(document, path))
        assert server.request("POST", path, body)[0] == 400


def test_a_key_is_asked_for_where_one_is(tmp_path, document):
    """Of users, or of the administrator alone."""
    assert not any("security" in operation for methods in document["paths"].values() for operation in methods.values())
    for number, flags in enumerate(({"api_key": "user"}, {"admin_api_key": "root"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Server(folder, **flags) as server:
            paths = server.get("/openapi.json")[1]["paths"]
            for path, methods in paths.items():
                for method, operation in methods.items():
                    status, _, _ = server.request(method.upper(), path.replace("{id}", "x"))
                    assert ("security" in operation) == (status == 401), (method, path)


def test_the_page_to_read_loads_nothing(server, document):
    code, headers, raw = server.request("GET", "/docs")
    assert (code, headers.get_content_type()) == (200, "text/html")
    text = raw.decode()
    assert not re.search(r"https?:|<script|<link|src=", text)
    for path in document["paths"]:
        assert f"<code>{path}</code>" in text
    assert "max_completion_tokens" in text
    assert MODEL not in text
