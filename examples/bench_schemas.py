"""JSON schemas with valid and invalid instances against the server's own way from a schema to a mask.

    python -m examples.bench_schemas FILE [--model-path PATH]

FILE has one JSON object a line, `{"id", "schema", "tests": [{"valid", "data"}], "features"}`, as MaskBench. Each schema
goes through the front door's check and a rank's compiler; each instance, written compactly, is walked token by token,
and each token must be in the mask. A schema passes if all its instances are told right as they come; its outcome is
`order` if valid ones are accepted once their properties stand in the schema's order, in which the server writes them.
Prints a table by feature and one line of JSON, its times in CPU milliseconds. Exit code 1 if an invalid instance was
let through.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from examples.host import json_lines
from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import Form
from srt.frontend.grammar_check import GrammarCheck
from srt.model_files import locate
from srt.schema_rules import GrammarError
from srt.tokenization import Tokenizer

OUTCOMES = ("pass", "order", "refused", "strict", "loose")


class Walk:
    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.vocabulary(eos_token_ids)
        self._encode = vocabulary.encode
        self._eos = vocabulary.eos_token_ids[0]
        self._check = GrammarCheck(vocabulary)
        self._backend = LLGuidance(vocabulary)
        self._bits = np.empty((1, -(-len(vocabulary.table) // 32)), np.int32)
        self.door_s: list[float] = []
        self.compile_s: list[float] = []
        self.mask_s: list[float] = []

    def schema(self, schema: Any, tests: list[dict[str, Any]]) -> tuple[str, str]:
        """One of OUTCOMES, and a reason."""
        begin = time.thread_time()
        try:
            grammar = self._check(Form("json_schema", schema, "schema"))
        except GrammarError as error:
            return "refused", str(error)
        finally:
            self.door_s.append(time.thread_time() - begin)
        begin = time.thread_time()
        compiled = self._backend.compile(grammar.text)
        self.compile_s.append(time.thread_time() - begin)
        outcome = "pass"
        for test in tests:
            accepted, where = self._accepts(compiled.matcher(), test["data"])
            if accepted and not test["valid"]:
                return "loose", json.dumps(test["data"])[:200]
            if test["valid"] and not accepted and outcome != "strict":
                reason = where
                ordered, _ = self._accepts(compiled.matcher(), Order(schema).of(test["data"], [schema]))
                outcome = "order" if ordered else "strict"
        return outcome, "" if outcome == "pass" else reason

    def _accepts(self, matcher: Any, data: Any) -> tuple[bool, str]:
        ids = self._encode(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
        for at, token in enumerate([*ids, self._eos]):
            begin = time.thread_time()
            self._backend.fill([matcher], self._bits)
            self.mask_s.append(time.thread_time() - begin)
            if not self._bits[0, token // 32] >> token % 32 & 1:
                return False, self._tokenizer.decode(ids[: at + 1], skip_special_tokens=False)[-100:]
            matcher.accept(token)
        return not matcher.fault, matcher.fault


class Order:
    """Properties as a schema lists them, then the others as they come."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, data: Any, schemas: list[Any]) -> Any:
        """`data` under all of `schemas`."""
        schemas = [part for schema in schemas for part in self._parts(schema)]
        if isinstance(data, list):
            return [self.of(item, self._inner(schemas, "items", at)) for at, item in enumerate(data)]
        if not isinstance(data, dict):
            return data
        listed = [name for schema in schemas for name in schema.get("properties", {})]
        listed += [name for schema in schemas for name in schema.get("required", [])]
        names = [name for name in dict.fromkeys(listed) if name in data]
        names += [name for name in data if name not in names]
        return {name: self.of(data[name], self._inner(schemas, "properties", name)) for name in names}

    def _parts(self, schema: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(schema, dict):
            return
        yield schema
        if str(schema.get("$ref")).startswith("#"):
            place = self._root
            for step in schema["$ref"][1:].split("/")[1:]:
                place = place[int(step) if isinstance(place, list) else step.replace("~1", "/").replace("~0", "~")]
            yield from self._parts(place)
        for key in ("allOf", "anyOf", "oneOf"):
            for part in schema.get(key, []):
                yield from self._parts(part)

    @staticmethod
    def _inner(schemas: list[dict[str, Any]], key: str, at: int | str) -> list[Any]:
        found = []
        for schema in schemas:
            inner = schema.get(key)
            if key == "items":
                found.append(inner[at] if isinstance(inner, list) and at < len(inner) else inner)
            elif at in (inner or {}):
                found.append(inner[at])
            else:
                matching = [one for name, one in schema.get("patternProperties", {}).items() if re.search(name, at)]
                found += matching or [schema.get("additionalProperties")]
        return found


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {f"p{share}": round(1000 * float(np.percentile(seconds, share)), 3) for share in (50, 99, 100)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", metavar="FILE", type=json_lines)
    parser.add_argument("--model-path")
    parser.add_argument("--verbose", action="store_true", help="name each schema that does not pass")
    options = parser.parse_args()
    files = locate(options.model_path, "auto", None, log=lambda *_: None)
    walk = Walk(Tokenizer.from_folder(files.tokenizer_folder), files.model_config.eos_token_ids)
    outcomes: Counter[str] = Counter()
    features: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for case in options.cases:
        outcome, reason = walk.schema(case["schema"], case["tests"])
        outcomes[outcome] += 1
        if outcome != "pass":
            reasons[f"{outcome}: {reason}"] += 1
            if options.verbose:
                print(f"{case['id']}: {outcome}: {reason}", file=sys.stderr)
        for feature in case["features"]:
            features.setdefault(feature, Counter())[outcome] += 1
    width = max(map(len, features), default=8)
    print(f"{'feature':{width}}", *(f"{outcome:>8}" for outcome in OUTCOMES))
    for feature, counts in sorted(features.items(), key=lambda item: (-item[1].total(), item[0])):
        print(f"{feature:{width}}", *(f"{counts[outcome]:8}" for outcome in OUTCOMES))
    total = outcomes.total()
    print(
        json.dumps(
            {
                "schemas": total,
                **{outcome: outcomes[outcome] for outcome in OUTCOMES},
                "pass_share": round(outcomes["pass"] / total, 4),
                "in_order_share": round((outcomes["pass"] + outcomes["order"]) / total, 4),
                "door_ms": milliseconds(walk.door_s),
                "compile_ms": milliseconds(walk.compile_s),
                "mask_ms": milliseconds(walk.mask_s),
                "masks": len(walk.mask_s),
            }
        )
    )
    return 1 if outcomes["loose"] else 0


if __name__ == "__main__":
    sys.exit(main())
