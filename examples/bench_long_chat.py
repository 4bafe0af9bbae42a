"""What the turns of one long chat wait for: sends a server a chat that grows until its context is full.

    python -m examples.bench_long_chat --base-url http://127.0.0.1:30000 --context 8192

Every turn brings `--words` new words and asks for `--output` tokens; the server keeps the rest cached. Prints one line
of JSON: of the second turn and of the last, medians over that turn and two next to it, prompt tokens and cached ones,
`first_token_ms` (the server's own time up to the first token) and `front_ms` of it, in which the body is read, the
template rendered and the text tokenised; and the ratios of the last to the second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import urllib.request
from typing import Any

from examples.host import machine, need_server
from examples.workloads import WORDS

FRONT = ("parse", "render", "tokenize", "dispatch")
FIRST_TOKEN = (*FRONT, "transit", "queue", "launch", "prefill")


def ask(base_url: str, messages: list[dict[str, str]], output: int) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": output, "temperature": 0, "ignore_eos": True, "return_timeline": True}
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--output", type=int, default=16)
    args = parser.parse_args()
    need_server(args.base_url)

    rng = random.Random(0)
    messages: list[dict[str, str]] = []
    turns: list[dict[str, float]] = []
    while not turns or turns[-1]["prompt_tokens"] + 2 * (args.words + args.output + 16) < args.context:
        messages.append({"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(args.words))})
        answer = ask(args.base_url, messages, args.output)
        choice, usage = answer["choices"][0], answer["usage"]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        spent = choice["timeline"]
        turns.append(
            {
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "first_token_ms": 1e3 * sum(spent[name] for name in FIRST_TOKEN),
                "front_ms": 1e3 * sum(spent[name] for name in FRONT),
            }
        )
    second, last = summary(turns[1:4]), summary(turns[-3:])
    ratios = {name: round(last[name] / second[name], 3) for name in ("first_token_ms", "front_ms")}
    report = {"bench": "long_chat", "turns": len(turns), "second": second, "last": last, "ratio": ratios}
    print(json.dumps(report | {"machine": machine(), "args": vars(args)}))


if __name__ == "__main__":
    main()
