"""Generates text in this process's own program, without a server: at once, as a stream, and asynchronously.

python -m examples.offline                         # the default model
python -m examples.offline --model path/to/model --device cuda
"""

from __future__ import annotations

import argparse
import asyncio

from examples.host import device_name
from srt.engine import Engine

PROMPTS = ["The capital of France is", "Water boils at", "The first prime numbers are"]


async def at_the_same_time(engine: Engine) -> list[str]:
    params = {"max_new_tokens": 16, "temperature": 0}
    answers = await asyncio.gather(*(engine.async_generate(prompt, params) for prompt in PROMPTS))
    return [answer["text"] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file or hub id; the default model if unset")
    parser.add_argument("--device", type=device_name, default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    with Engine(args.model, device=args.device) as engine:
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, {"max_new_tokens": 16}), strict=True):
            print(f"{prompt}{answer['text']!r}  ({answer['meta_info']['finish_reason']['type']})")
        shown = ""
        for event in engine.generate("Once upon a time", {"max_new_tokens": 32, "temperature": 0.7}, stream=True):
            print(event["text"].removeprefix(shown), end="", flush=True)
            shown = event["text"]
        print()
        print(asyncio.run(at_the_same_time(engine)))


if __name__ == "__main__":
    main()
