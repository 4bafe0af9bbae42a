"""Tokens per second of JSON by a schema that says much, with what it forces drafted and without, against free text.

    python -m examples.bench_jump_forward [--rows 1 16] [--pairs 9] [--temperature 0.7] [--whitespace fixed]

The default model and the real scheduler, without processes around it. All requests come at once; free text has as many
tokens, request by request, as the JSON before it, and prompts are cached. The three kinds of runs take turns, and
ratios are those of neighbours. With `--whitespace fixed` nothing but a blank after each comma and colon is allowed, so
the schema forces more. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from examples.host import device_name, interval
from srt.constrained.manager import GrammarManager
from srt.executor.shape import ExecutorShape
from srt.executor.weights import iterate_weights
from srt.frontend.constraints import WHITESPACE, Form
from srt.frontend.grammar_check import GrammarCheck
from srt.messages import Grammar, GrammarReady, Inbox, NewRequest, SamplingParams, TokenBatch, pack_ids
from srt.model_files import locate
from srt.models.loader import load_model
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.jump_forward import JumpForward
from srt.scheduler.outlet import SilentOutlet
from srt.tokenization import Tokenizer

CONTEXT, BUDGET = 512, 256
PROMPT = "An order of a web shop, as a JSON object:\n"


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, FLAG = {"type": "string", "maxLength": 12}, {"type": "boolean"}
SCHEMA = record(
    order_identifier={"type": "integer", "minimum": 1, "maximum": 99999},
    order_status={"enum": ["awaiting_payment", "ready_for_shipment", "delivered_to_customer"]},
    customer=record(first_name=TEXT, last_name=TEXT, is_returning_customer=FLAG),
    shipping_address=record(street_and_number=TEXT, postal_code=TEXT, country_code={"enum": ["DE", "FR", "US"]}),
    payment=record(payment_method={"enum": ["credit_card", "bank_transfer"]}, currency_code={"const": "EUR"}),
    gift_wrapping_requested=FLAG,
    preferred_delivery_window={"enum": ["weekday_morning", "weekday_evening", "saturday"]},
)


class Run:
    """Intake, record and outlet of a scheduler that ends with its last request."""

    holds = False

    def __init__(self, requests: Sequence[NewRequest], manager: GrammarManager, done: threading.Semaphore) -> None:
        self.lengths = dict.fromkeys((request.rid for request in requests), 0)
        self.steps = 0
        self.scheduler: Any = None
        self._left = len(requests)
        self._manager = manager
        self._done = done
        self._encode = msgspec.msgpack.Encoder().encode
        self._items: list[Any] = list(requests)

    def next(self, wait: bool) -> Inbox:
        self.steps += 1
        for serial in self._manager.compiling:
            self._done.acquire()
            self._items.append(GrammarReady(serial))
        items, self._items = tuple(map(self._encode, self._items)), []
        return Inbox(self.steps, float(self.steps), items)

    def tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            self.lengths[delta.rid] += len(delta.ids) // 4
            self._left -= delta.finish is not None
        self.scheduler.stopped = self._left == 0

    def step(self, decision: Any) -> None:
        pass

    def gauges(self, **values: int) -> None:
        pass

    reply = release = SilentOutlet.release


class Bench:
    def __init__(self, args: argparse.Namespace, num_rows: int) -> None:
        files = locate(None, "auto", None, log=lambda *_: None)
        config = files.model_config
        device, dtype = torch.device(args.device), torch.bfloat16
        self.tokenizer = Tokenizer.from_folder(files.tokenizer_folder)
        vocabulary = self.tokenizer.vocabulary(config.eos_token_ids)
        form = Form("json_schema", SCHEMA, "schema", whitespace=WHITESPACE if args.whitespace == "free" else None)
        self._grammar = GrammarCheck(vocabulary)(form)
        self._done = threading.Semaphore(0)
        self._manager = GrammarManager(vocabulary, lambda serial: self._done.release(), 4)
        self._temperature = args.temperature
        self._settings = Settings(
            num_pages=num_rows * CONTEXT,
            page_size=1,
            num_rows=num_rows,
            context_length=CONTEXT,
            cache_enabled=True,
            policy="fcfs",
            low_priority_first=False,
            token_budget=BUDGET,
            overlap=args.device == "cuda",
            eos_token_ids=tuple(config.eos_token_ids),
            token_bytes=tuple(vocabulary.table),
            is_special=bytes(vocabulary.is_special),
        )
        shape = ExecutorShape(
            num_rows, CONTEXT, num_rows * CONTEXT, 1, self.tokenizer.vocab_size, kv_dtype=dtype, device=device
        )
        weights = iterate_weights(files, dtype, device=device)
        model = load_model(config, weights, dtype, device, context_length=CONTEXT)
        if device.type == "cpu":
            from srt.executor.model_runner import ModelRunner

            self._executor: Any = ModelRunner(model, config, shape)
        else:
            from srt.executor.cuda_runner import CudaRunner

            self._executor = CudaRunner(model, config, shape, most_tokens=BUDGET)
            self._executor.warm_up()

    def run(self, grammar: Grammar | None, drafts: bool, lengths: Sequence[int]) -> tuple[float, Run]:
        """Tokens per second of as many requests as there are lengths, and how it went."""
        prompt = pack_ids(self.tokenizer.encode(PROMPT, True))
        requests = [
            NewRequest(
                rid,
                prompt,
                SamplingParams(length, temperature=self._temperature, seed=rid, ignore_eos=grammar is None),
                grammar=grammar,
            )
            for rid, length in enumerate(lengths)
        ]
        run = Run(requests, self._manager, self._done)
        run.scheduler = assemble(
            self._settings,
            executor=self._executor,
            intake=run,
            outlet=run,
            record=run,
            grammars=self._manager,
            drafter=JumpForward(self._manager) if drafts else None,
        )
        begin = time.perf_counter()
        run.scheduler.run()
        return sum(run.lengths.values()) / (time.perf_counter() - begin), run

    def round(self, num_requests: int) -> tuple[tuple[float, Run], ...]:
        """Drafted, plain, free text."""
        most = [CONTEXT - 64] * num_requests
        drafted = self.run(self._grammar, True, most)
        plain = self.run(self._grammar, False, most)
        free = self.run(None, False, list(drafted[1].lengths.values()))
        return drafted, plain, free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=device_name, default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--whitespace", choices=("free", "fixed"), default="free")
    args = parser.parse_args()
    bench = Bench(args, max(args.rows))
    report: dict[str, Any] = {"device": args.device, "whitespace": args.whitespace, "pairs": args.pairs}
    for rows in args.rows:
        bench.round(rows)
        rounds = [bench.round(rows) for _ in range(args.pairs)]
        speeds = [[speed for speed, _ in kinds] for kinds in rounds]
        drafted, plain, _ = (run for _, run in rounds[0])
        report[f"rows_{rows}"] = {
            "tokens": sum(drafted.lengths.values()),
            "steps_drafted": drafted.steps,
            "steps_plain": plain.steps,
            "tokens_s_drafted": round(statistics.median(speed[0] for speed in speeds), 1),
            "tokens_s_plain": round(statistics.median(speed[1] for speed in speeds), 1),
            "tokens_s_free_text": round(statistics.median(speed[2] for speed in speeds), 1),
            "over_free_text": round(statistics.median(speed[0] / speed[2] for speed in speeds), 3),
            "over_free_text_interval": interval([speed[0] / speed[2] for speed in speeds]),
            "over_plain": round(statistics.median(speed[0] / speed[1] for speed in speeds), 3),
            "over_plain_interval": interval([speed[0] / speed[1] for speed in speeds]),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
