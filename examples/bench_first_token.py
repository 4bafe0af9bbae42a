"""What a JSON schema adds to the time to the first token, where the server has not seen it and where it has.

    python -m examples.bench_first_token FILE [--base-url http://127.0.0.1:30000] [--schemas 100]

FILE has JSON objects with a `schema`, one a line. One connection, one request at a time, one token each, the same
prompt always, so that all of it is cached. Each schema is asked for twice, between two requests without one; what it
adds is over their mean. Start a fresh server: schemas that it knows are not cold. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from examples.host import json_lines, need_server

PROMPT = "Write one JSON document."


class Client:
    def __init__(self, base_url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(base_url).netloc)

    def ms(self, schema: Any = None) -> float | None:
        """Milliseconds until the answer; None if the schema is refused."""
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "temperature": 0}
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        raw = json.dumps(body)
        begin = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", raw, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        response.read()
        took = 1000 * (time.perf_counter() - begin)
        if response.status == 400 and schema is not None:
            return None
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}")
        return took


def shares(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"p50": round(statistics.median(values), 3), "p95": round(cuts[18], 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", metavar="FILE", type=json_lines)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need_server(options.base_url)
    schemas = [line["schema"] for line in options.lines]
    random.Random(options.seed).shuffle(schemas)
    client = Client(options.base_url)
    for _ in range(20):
        client.ms()
    plain: list[float] = []
    cold: list[float] = []
    cached: list[float] = []
    for schema in schemas:
        before, first = client.ms(), client.ms(schema)
        if first is None:
            continue
        again, after = client.ms(schema), client.ms()
        plain.append((before + after) / 2)
        cold.append(first - plain[-1])
        cached.append(again - plain[-1])
        if len(plain) == options.schemas:
            break
    if len(plain) < 2:
        sys.exit("percentiles take two schemas that are served")
    figures = {"plain_ms": shares(plain), "cold_adds_ms": shares(cold), "cached_adds_ms": shares(cached)}
    print(json.dumps({"schemas": len(plain), **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
