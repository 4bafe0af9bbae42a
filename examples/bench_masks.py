"""Time of a decode step with a grammar on every row against the same step without, and of its parts.

    python -m examples.bench_masks FILE [--rows 16] [--steps 32] [--pairs 9] [--device cuda --model llama-3.1-8b]

FILE has JSON objects with a `schema`, one a line. The model has random weights, so its rows wander through their
grammars at random; a row whose grammar has ended begins again. The tokenizer is the default model's, or for another
shape one of bytes and made-up words. Runs alternate, with masks and without, and the ratio is of the two runs of a
pair. Prints one line of JSON; times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.bench_one_batch import Driver, make_runner
from examples.host import device_name, interval, json_lines
from examples.model_shapes import SHAPES, write_model
from srt.constrained.manager import GrammarManager
from srt.executor.shape import ExecutorShape
from srt.frontend.constraints import Form
from srt.frontend.grammar_check import GrammarCheck
from srt.messages import Grammar, SamplingParams
from srt.model_config import ModelConfig
from srt.model_files import locate
from srt.schema_rules import GrammarError
from srt.token_bytes import Vocabulary
from srt.tokenization import Tokenizer

DEFAULT_MODEL = "smollm2-135m"


class Rows:
    """A grammar for each row, begun again where it ends."""

    def __init__(self, vocabulary: Vocabulary, lines: list[Any], num_rows: int) -> None:
        check, rnd = GrammarCheck(vocabulary), random.Random(0)
        self._grammars: list[Grammar] = []
        while len(self._grammars) < num_rows:
            schema = rnd.choice(lines)["schema"]
            try:
                self._grammars.append(check(Form("json_schema", schema, "schema")))
            except GrammarError:
                continue
        self._done = threading.Semaphore(0)
        self._manager = GrammarManager(vocabulary, lambda serial: self._done.release(), len(self._grammars) + 1)
        for row, grammar in enumerate(self._grammars):
            self._manager.open(row, grammar, False)
        for _ in self._manager.compiling:
            self._done.acquire()
        for serial in self._manager.compiling:
            self._manager.ready(serial)
        self.mask_s: list[float] = []
        self.accept_s: list[float] = []

    def masks(self) -> Any:
        begin = time.perf_counter()
        rows = list(range(len(self._grammars)))
        masks = self._manager.masks(rows, rows, {})
        self.mask_s.append(time.perf_counter() - begin)
        return masks

    def accept(self, tokens: np.ndarray) -> None:
        begin = time.perf_counter()
        for row, token in enumerate(tokens.tolist()):
            if self._manager.accept(row, token).ends:
                self._manager.drop(row)
                self._manager.open(row, self._grammars[row], False)
        self.accept_s.append(time.perf_counter() - begin)


def vocabulary_of(model: str) -> Vocabulary:
    if model == DEFAULT_MODEL:
        files = locate(None, "auto", None, log=lambda *_: None)
        return Tokenizer.from_folder(files.tokenizer_folder).vocabulary(files.model_config.eos_token_ids)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        write_model(model, Path(folder))
        return Tokenizer.from_folder(Path(folder)).vocabulary((SHAPES[model]["vocab_size"] - 1,))


def timed(runner: Any, plans: list[Any], rows: Rows | None) -> float:
    """Milliseconds a step, planned and committed as the scheduler does: masks wait for the step before."""
    previous = None
    begin = time.perf_counter()
    for plan in plans:
        launched = runner.forward(plan)
        if previous is not None:
            result = runner.result(previous)
            if rows is not None:
                rows.accept(result.tokens)
        runner.sample(launched, None if rows is None else rows.masks())
        previous = launched
    result = runner.result(previous)
    if rows is not None:
        rows.accept(result.tokens)
    return (time.perf_counter() - begin) * 1e3 / len(plans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", metavar="FILE", type=json_lines)
    parser.add_argument("--model", choices=SHAPES, default=DEFAULT_MODEL)
    parser.add_argument("--device", type=device_name, default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.set_defaults(no_graphs=False, chunk=8192)
    args = parser.parse_args()
    config, device = ModelConfig.from_hf(SHAPES[args.model]), torch.device(args.device)
    rows = Rows(vocabulary_of(args.model), args.lines, args.rows)
    length = args.context + args.steps
    shape = ExecutorShape(
        num_rows=args.rows,
        context_length=length,
        pool_tokens=args.rows * length,
        page_size=1,
        num_tokens_vocab=config.vocab_size,
        kv_dtype=getattr(torch, args.dtype),
        device=device,
    )
    runner = make_runner(config, shape, args)
    sampling = SamplingParams(max_new_tokens=args.steps, temperature=args.temperature)
    driver = Driver(runner, config, length, shape.pool_tokens, sampling)
    driver.run(driver.prefill(args.rows, args.context, 1024))
    plans = driver.decode(args.rows, args.context, args.steps)
    pairs = []
    for index in range(-1, args.pairs):
        with_masks, without = (
            (timed(runner, plans, rows), timed(runner, plans, None))
            if index % 2
            else (timed(runner, plans, None), timed(runner, plans, rows))[::-1]
        )
        if index >= 0:  # the first pair warms up
            pairs.append((with_masks, without))
    ratios = [a / b for a, b in pairs]
    print(
        json.dumps(
            {
                "rows": args.rows,
                "pairs": args.pairs,
                "step_ms_with_masks": round(statistics.median(a for a, _ in pairs), 3),
                "step_ms_without": round(statistics.median(b for _, b in pairs), 3),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_interval": interval(ratios),
                "fill_ms": round(1e3 * statistics.median(rows.mask_s), 3),
                "accept_ms": round(1e3 * statistics.median(rows.accept_s), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
