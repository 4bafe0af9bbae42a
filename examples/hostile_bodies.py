"""Bodies that nobody should send, for every route: valid ones with faults. Number i of a seed is always the same."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 1 << 20  # a client that is refused while it still sends may not read why
DEEPEST = 30  # level at which a body gets faults

HI = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 2, {"a": None}]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TALK = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"name": "x"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"name": "x"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12 degrees"}]},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "12 degrees"},
]
SAMPLING = {
    "max_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["a", "b"], "n": 2,
    "frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
    "stop_token_ids": [7], "min_new_tokens": 1, "sampling_seed": 3, "ignore_eos": True, "skip_special_tokens": False,
}  # fmt: skip
VALID: dict[str, list[Any]] = {
    "POST /v1/chat/completions": [
        {"messages": HI, "max_tokens": 2},
        {"messages": HI, "max_tokens": 2, "n": 2, "stop": ["x"], "stream": True, "seed": 1, "temperature": 0.5,
         "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        {"messages": HI, "max_tokens": 4, "response_format": FORMAT, "stream": True},
        {"messages": TALK, "max_tokens": 4, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": TALK, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto", "stream": True},
        {"messages": HI, "max_tokens": 3, "structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {"1": -1}},
    ],
    "POST /v1/completions": [
        {"prompt": "Once", "max_tokens": 2},
        {"prompt": ["One", "Two"], "max_tokens": 1, "echo": True, "logprobs": 2, "best_of": 2, "stream": False},
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "cache_salt": "s", "priority": 1},
        {"prompt": "x", "max_tokens": 4, "regex": "(ab|c)+d?[e-g]{1,3}"},
        {"prompt": "x", "max_tokens": 4, "ebnf": 'root ::= "a" b*\nb ::= [b-d] | "e"'},
        {"prompt": "x", "max_tokens": 4, "json_schema": SCHEMA, "min_tokens": 1},
    ],
    "POST /v1/responses": [
        {"input": "Hello", "max_output_tokens": 2},
        {"input": ITEMS, "max_output_tokens": 4, "instructions": "Be brief.", "stream": True, "tool_choice": "required",
         "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
        {"input": "Hello", "max_output_tokens": 2, "background": True, "store": True, "metadata": {"a": "b"},
         "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}, "reasoning": {"effort": "low"}},
    ],
    "POST /v1/messages": [
        {"messages": HI, "max_tokens": 2, "system": "Be brief.", "stop_sequences": ["x"]},
        {"messages": BLOCKS, "max_tokens": 3, "tools": [{"name": "weather", "input_schema": SCHEMA}], "stream": True,
         "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}},
    ],
    "POST /v1/messages/count_tokens": [{"messages": BLOCKS, "tools": [{"name": "weather", "input_schema": SCHEMA}]}],
    "POST /generate": [
        {"text": "Once", "sampling_params": SAMPLING},
        {"text": ["a", "b"], "sampling_params": [SAMPLING, {"max_new_tokens": 1}], "rid": ["x", "y"], "stream": True},
        {"input_ids": [[1, 2, 3]], "sampling_params": {"max_new_tokens": 1}, "return_logprob": [True],
         "return_text_in_logprobs": True, "logprob_start_len": 0, "top_logprobs_num": [2],
         "token_ids_logprob": [[4, 5]]},
        {"text": "x", "sampling_params": {"max_new_tokens": 4, "json_schema": json.dumps(SCHEMA)}, "extra_key": "k"},
        {"text": "x", "sampling_params": {"max_new_tokens": 4, "structural_tag": json.dumps(
            {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"},
                                                  "end": "</a>"}})}},
    ],
    "PUT /generate": [{"text": "Once", "sampling_params": {"max_new_tokens": 1}}],
    "POST /v1/embeddings": [{"input": "a"}],
    "POST /tokenize": [{"prompt": "a b", "add_special_tokens": True}, {"messages": TALK, "tools": [TOOL]}],
    "POST /v1/tokenize": [{"text": "a b", "return_token_strs": True}],
    "POST /detokenize": [{"tokens": [1, 2, 3], "skip_special_tokens": True}],
    "POST /v1/detokenize": [{"tokens": []}],
    "POST /v1/responses/{}/cancel": [None],
    "POST /abort_request": [{"rid": "x", "abort_message": "m"}, {"abort_all": True}],
    "POST /pause_generation": [{"mode": "retract"}, {"mode": "in_place"}, {}],
    "POST /continue_generation": [None],
    "POST /flush_cache": [None],
    "POST /configure_logging": [{"log_requests": True, "log_requests_level": 2, "log_level": "warning"}],
    "POST /start_profile": [{"num_steps": 1, "activities": ["CPU"]}],
    "POST /stop_profile": [None],
    "POST /update_weights_from_disk": [{"model_path": "", "load_format": "auto", "weight_version": "2"}],
    **{f"GET {path}": [None] for path in (
        "/", "/v1/models", "/v1/models/{}", "/v1/responses/{}", "/page/data", "/page/node", "/health", "/ready",
        "/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/loads",
        "/get_load", "/metrics", "/version", "/openapi.json", "/docs", "/flush_cache", "/nowhere",
    )},
    "DELETE /v1/responses/{}": [None],
}  # fmt: skip
# Most bodies go where most can go wrong.
WEIGHTS = {"POST /v1/chat/completions": 12, "POST /v1/completions": 8, "POST /v1/responses": 8, "POST /v1/messages": 6,
           "POST /generate": 10, "POST /tokenize": 3,
           "POST /start_profile": 0.1}  # fmt: skip  # the profiler does not give back all of its memory

DEEP_LIST = json.loads("[" * 200 + "]" * 200)
DEEP_SCHEMA: dict[str, Any] = {"type": "string"}
for _ in range(200):
    DEEP_SCHEMA = {"type": "array", "items": DEEP_SCHEMA}
NUMBERS = (
    0, -1, 1, 2, 127, 128, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0,
    1e-300, 1e300, 5e-324, 1.5, 49151, 49152,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "x" * 5000, "\x00", "\n" * 50, "\ud83d", "\udc00x", "é" * 3, "e\u0301", "\u202eabc", "\ufeff",
    "🎉" * 40, "👩‍👩‍👧‍👦", "null", "true", "1", "NaN", "{}", "[]", '{"type": "string"}', "$ref", "../../etc/passwd",
    "%s%n", "<|im_end|>", "<tool_call>", "</think>", "(((((", "(a+)+$", "[^", "a{1000000}", "(?=a)", "\\p{L}+",
    "root ::= root", 'root ::= "', "data: [DONE]\n\n", "\r\nX-Evil: 1", "auto", "none", "required", "json_object",
    "assistant", "function",
)  # fmt: skip
OTHERS = (
    None, True, False, [], {}, [[]], [None], [0] * 3000, {"": 0}, {"a": {"b": []}}, ["a"] * 40, [HI], DEEP_LIST,
    DEEP_SCHEMA, {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"type": "array", "minItems": 10**9}, {"enum": []},
    {"type": "object", "properties": {str(i): {} for i in range(300)}}, {"pattern": "(a*)*b"}, {"type": "nonsense"},
    {"multipleOf": 1e-9}, {"maxLength": -1}, {"minimum": "x"}, {"not": {}}, {"if": True, "then": False}, [TOOL] * 200,
    {"type": "function", "function": {"name": "nobody"}}, {"anyOf": [{"const": i} for i in range(500)]},
)  # fmt: skip
HEADERS = (
    {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": ""},
    {"Content-Type": "multipart/form-data; boundary=x"}, {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}, {"Content-Encoding": "br"},
    {"Content-Encoding": "nonsense"}, {"Expect": "100-continue"}, {"Authorization": "Bearer \xff"},
    {"Authorization": "x"}, {"X-Request-ID": "a" * 999}, {"Accept": "nothing/*"}, {"traceparent": "00-zz-1"},
    {"Range": "bytes=9-1"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Cookie": "=" * 99},
)  # fmt: skip
STRAY_BYTES = (b"\xff", b"\xed\xa0\x80", b"NaN", b"1e99999", b"\\ud800", b"\x00", b"}", b'"', b",")
QUERIES = ("timeout=1e999", "timeout=nan", "timeout=-1", "timeout=", "%00", "engine=99&ticket=x&index=-1", "a=b&a=c",
           "engine=0&ticket=1&index=1e9", "=&=&", "%ff%fe", "x" * 2000, "timeout=%D9%A3")  # fmt: skip
NAMES = ("x", "..", "%2e%2e", "a" * 3000, "%00", "%ff", "%F0%9F%8E%89", "resp_", "a/b", "null", "%0d%0a")
RAW = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/9.9\r\n\r\n", b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\x00" * 300,
    b"GET " + b"/a" * 20000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", b"\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3000000\r\n\r\n" + b"a" * 3_000_000,
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip


@dataclass
class Shot:
    number: int
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None  # sent as it stands

    @property
    def route(self) -> str:
        return "no HTTP" if self.raw else f"{self.method} {self.path.partition('?')[0][:40]}"


class Fuzzer:
    """`fields` are the names that each path's body may have; `folder` is where the server may write."""

    def __init__(self, seed: int, fields: dict[str, list[str]], folder: str) -> None:
        self._seed = seed
        self._fields = fields
        self._folder = folder
        self._routes = list(VALID)
        self._weights = [WEIGHTS.get(route, 1) for route in self._routes]

    def shot(self, number: int) -> Shot:
        rng = random.Random(f"{self._seed}-{number}")
        if rng.random() < 0.02:
            return Shot(number, "", "", raw=rng.choice(RAW))
        [route] = rng.choices(self._routes, self._weights)
        method, path = route.split()
        body = copy.deepcopy(rng.choice(VALID[route]))
        if body is None and rng.random() < 0.3:
            body = _junk(rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
            body = self._mutate(rng, path, body)
        if path == "/start_profile" and isinstance(body, dict):
            body["output_dir"] = self._folder
        if path == "/update_weights_from_disk" and isinstance(body, dict) and isinstance(body.get("model_path"), str):
            body["model_path"] = self._folder  # a name might be asked of a hub
        text = None if body is None else json.dumps(body, ensure_ascii=rng.random() < 0.5)
        raw = None if text is None else text.encode("utf-8", "surrogatepass")
        if raw is not None and rng.random() < 0.25:
            raw = _break(rng, raw)
        if path.count("{}"):
            path = path.replace("{}", rng.choice(NAMES))
        if rng.random() < (0.4 if method == "GET" else 0.05):
            path += "?" + rng.choice(QUERIES)
        if rng.random() < 0.05:
            method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"))
        headers = {"Content-Type": "application/json"}
        if rng.random() < 0.1:  # after some of these the connection may be closed
            headers |= {"Connection": "close", **rng.choice(HEADERS)}
        return Shot(number, method, path, raw and raw[:MOST_BYTES], headers)

    def _mutate(self, rng: random.Random, path: str, body: Any) -> Any:
        """The body with one more fault."""
        places = list(_places(body))
        if not places or rng.random() < 0.03:
            return _junk(rng)
        holder, key = rng.choice(places)
        match rng.randrange(9):
            case 0 | 1:
                holder[key] = _junk(rng)
            case 2:
                del holder[key]
            case 3:
                holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 50, str(holder[key])))
            case 4:
                other_holder, other_key = rng.choice(places)
                pair = copy.deepcopy((holder[key], other_holder[other_key]))  # one may lie in the other
                other_holder[other_key], holder[key] = pair
            case 5 if isinstance(holder, dict):
                holder[rng.choice((*TEXTS, key + "s", key.upper()))] = holder.pop(key)
            case 6 if isinstance(holder[key], str) and holder[key]:
                cut = rng.randrange(len(holder[key]))
                holder[key] = holder[key][:cut] + rng.choice(TEXTS) + holder[key][cut:]
            case _ if isinstance(body, dict) and self._fields.get(path):
                body[rng.choice(self._fields[path])] = _junk(rng)
        return body


def _places(value: Any, level: int = 0) -> Iterator[tuple[Any, Any]]:
    """(container, key) of the values below `value`."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        if level < DEEPEST:
            yield from _places(value[key], level + 1)


def _junk(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, TEXTS, OTHERS))))


def _break(rng: random.Random, raw: bytes) -> bytes:
    """No longer the JSON that it was, or none at all."""
    at, end = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
    return rng.choice(
        (
            raw[:at],
            raw[:at] + raw[end:],
            raw[:end] + raw[at:],
            raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            raw[:at] + rng.choice(STRAY_BYTES) + raw[at:],
            raw + raw,
            raw.replace(b"}", b',"stream":true,"n":1,"n":2}', 1),
            b"\xef\xbb\xbf" + raw,
            raw.decode("utf-8", "replace").encode("utf-16"),
            b"[" * 50_000,
            b'{"messages":' * 5_000 + b"1",
            b" " * 100_000 + raw,
            b"9" * 100_000,
            b"",
        )
    )  # fmt: skip


def fields_of(document: dict[str, Any]) -> dict[str, list[str]]:
    """The names that each path's body may have, by the server's own description."""
    schemas = document["components"]["schemas"]
    found = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                found[path] = list(schemas[schema["$ref"].rpartition("/")[2]].get("properties", {}))
    return found
