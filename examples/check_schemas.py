"""Random schemas at a high temperature against a running server: is all that comes back what was asked for?

    python -m examples.check_schemas FILE [--base-url http://127.0.0.1:30000] [--requests 500] [--concurrency 16]

FILE has JSON objects with a `schema`, one a line. Every other answer is streamed. What has finished must validate
(`jsonschema`); what was cut must be a prefix that the schema's grammar accepts. Needs the model's tokenizer, as the
server finds it. Prints one line of JSON. Exit code 1 if an answer is not what was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

import aiohttp
import jsonschema

from examples.host import json_lines, need_server
from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import Form
from srt.frontend.grammar_check import GrammarCheck
from srt.model_files import locate
from srt.schema_rules import GrammarError
from srt.tokenization import Tokenizer

PROMPT = "Write one JSON document for this schema, as short as you can: "


class Prefixes:
    def __init__(self, model_path: str | None) -> None:
        files = locate(model_path, "dummy", None, log=lambda *_: None)
        tokenizer = Tokenizer.from_folder(files.tokenizer_folder)
        vocabulary = tokenizer.vocabulary(files.model_config.eos_token_ids)
        self._encode = vocabulary.encode
        self._check, self._backend = GrammarCheck(vocabulary), LLGuidance(vocabulary)

    def is_served(self, schema: Any) -> bool:
        try:
            self._check(Form("json_schema", schema, "schema"))
        except GrammarError:
            return False
        return True

    def accept(self, schema: Any, text: str) -> bool:
        """A character may be cut in two where an answer ends."""
        matcher = self._backend.compile(self._check(Form("json_schema", schema, "schema")).text).matcher()
        for token in self._encode(text.rstrip("\ufffd")):
            matcher.accept(token)
        return not matcher.fault


async def answer(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, text, finish reason."""
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            return response.status, await response.text(), ""
        if not body["stream"]:
            choice = (await response.json())["choices"][0]
            return 200, choice["message"]["content"], choice["finish_reason"]
        text, finish = "", ""
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return 500, event["error"]["message"], ""
            choice = event["choices"][0]
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
        return 200, text, finish


async def run(options: argparse.Namespace) -> dict[str, Any]:
    rnd = random.Random(options.seed)
    prefixes = Prefixes(options.model_path)
    schemas = [line["schema"] for line in options.lines]
    schemas = [schema for schema in schemas if len(json.dumps(schema)) < options.longest and prefixes.is_served(schema)]
    jobs = [(index, rnd.choice(schemas)) for index in range(options.requests)]
    outcomes: Counter[str] = Counter()

    async def worker(session: aiohttp.ClientSession) -> None:
        while jobs:
            index, schema = jobs.pop()
            body = {
                "messages": [{"role": "user", "content": PROMPT + json.dumps(schema)}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                "temperature": 1.0,
                "seed": index,
                "max_tokens": options.max_tokens,
                "stream": index % 2 == 1,
            }
            status, text, finish = await answer(session, body)
            outcome = judge(prefixes, schema, status, text, finish)
            outcomes[outcome] += 1
            if outcome in ("invalid", "no prefix", "error"):
                print(json.dumps({"outcome": outcome, "schema": schema, "answer": text}), file=sys.stderr)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(options.base_url, timeout=timeout) as session:
        await asyncio.gather(*(worker(session) for _ in range(options.concurrency)))
    ended = outcomes["valid"] + outcomes["invalid"]
    return {"requests": options.requests, **outcomes, "finished_share": round(ended / options.requests, 3)}


def judge(prefixes: Prefixes, schema: Any, status: int, text: str, finish: str) -> str:
    if status != 200 or finish not in ("stop", "length"):
        return "error"
    if finish == "length":
        return "prefix" if prefixes.accept(schema, text) else "no prefix"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return "invalid"
    return "valid"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", metavar="FILE", type=json_lines)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--model-path")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1500, help="characters of a schema")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need_server(options.base_url)
    result = asyncio.run(run(options))
    print(json.dumps(result))
    return 1 if any(result.get(outcome) for outcome in ("invalid", "no prefix", "error")) else 0


if __name__ == "__main__":
    sys.exit(main())
