"""Which share of decoding the device works: the real scheduler around the real executor, in one process, profiled.

    python -m examples.bench_engine --device cuda --model qwen3-0.6b --rows 256

`--rows` requests come at once and generate `--output` tokens each; nothing else of the server runs. Of `--steps` steps
in the middle of it the profiler tells when the GPU had work. Prints one line of JSON: `step_ms`, the time from one step
to the next without the profiler; `idle`, the share of the profiled time in which no kernel and no copy ran; `host_ms`,
what of a step the scheduler's Python takes, its waits for tokens excluded. `without_overlap` has the same of a
scheduler that commits a step before it plans the next.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import msgspec
import torch

from examples.bench_one_batch import make_runner
from examples.host import device_name, machine
from examples.model_shapes import SHAPES
from examples.simulated_engine import Record
from examples.workloads import random_prompts
from srt.executor.shape import ExecutorShape
from srt.messages import Inbox, NewRequest, SamplingParams, TokenBatch, pack_ids
from srt.model_config import ModelConfig
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.scheduler.scheduler import Scheduler


class Crowd:
    """Intake and outlet: all requests at once, and the end when all are answered."""

    scheduler: Scheduler
    holds = False

    def __init__(self, requests: list[NewRequest]) -> None:
        self._items = tuple(map(msgspec.msgpack.encode, requests))
        self._number = 0

    def next(self, wait: bool) -> Inbox:
        self._number += 1
        self.scheduler.stopped = wait and self._number > 1
        return Inbox(self._number, 0.0, self._items if self._number == 1 else ())

    def tokens(self, batch: TokenBatch) -> None:
        pass

    def release(self, number: int) -> None:
        pass

    def reply(self, reply: Any) -> None:
        raise AssertionError


class Watched:
    """An executor, watched from the step `first` with nothing but decode rows on, for `steps` steps."""

    def __init__(self, executor: Any, first: int, steps: int, profiler: Any = None) -> None:
        self.seconds = self.waited = 0.0  # of the watched steps
        self._executor = executor
        self._first, self._last = first, first + steps
        self._profiler = profiler
        self._step = 0
        self._begin = 0.0

    def forward(self, batch: ScheduleBatch) -> Any:
        if batch.num_rows == batch.num_decode:
            self._step += 1
            if self._step == self._first:
                if self._profiler is not None:
                    self._profiler.__enter__()
                self._begin = time.perf_counter()
            if self._step == self._last:
                self.seconds = time.perf_counter() - self._begin
                if self._profiler is not None:
                    self._profiler.__exit__(None, None, None)
        return self._executor.forward(batch)

    def sample(self, launched: Any, masks: TokenMasks | None) -> None:
        self._executor.sample(launched, masks)

    def result(self, launched: Any) -> StepResult:
        begin = time.perf_counter()
        result = self._executor.result(launched)
        if self._first <= self._step < self._last:
            self.waited += time.perf_counter() - begin
        return result


def busy_share(profiler: Any) -> float:
    """Of the time from the first event on the device to the last, the share in which there was one."""
    on_device = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((each.time_range.start, each.time_range.end) for each in on_device)
    busy, until = 0, spans[0][0]
    for start, end in spans:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / (until - spans[0][0])


def serve(executor: Any, requests: list[NewRequest], settings: Settings) -> None:
    crowd = Crowd(requests)
    crowd.scheduler = assemble(settings, executor=executor, intake=crowd, outlet=crowd, record=Record())
    crowd.scheduler.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--device", type=device_name, default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.6)
    args = parser.parse_args()
    args.chunk, args.no_graphs = 8192, False

    device = torch.device(args.device)
    config = ModelConfig.from_hf(SHAPES[args.model])
    context_length = args.input + args.output
    shape = ExecutorShape(
        args.rows,
        context_length,
        args.rows * context_length,
        1,
        config.vocab_size,
        kv_dtype=torch.bfloat16,
        device=device,
    )
    runner = make_runner(config, shape, args)
    prompts = random_prompts(0, num_prompts=args.rows, input_len=args.input, output_len=args.output)
    sampling = SamplingParams(args.output, temperature=args.temperature, ignore_eos=True)
    requests = [NewRequest(rid, pack_ids(each.prompts[0]), sampling) for rid, each in enumerate(prompts)]

    def settings(overlap: bool) -> Settings:
        return Settings(
            num_pages=args.rows * context_length,
            page_size=1,
            num_rows=args.rows,
            context_length=context_length,
            cache_enabled=True,
            policy="lpm",
            low_priority_first=False,
            token_budget=args.chunk,
            overlap=overlap,
            eos_token_ids=(),
            token_bytes=(b"x",) * config.vocab_size,
            is_special=bytes(config.vocab_size),
        )

    first = (args.output - args.steps) // 2

    def measure(overlap: bool) -> dict[str, float]:
        watched = Watched(runner, first, args.steps)
        serve(watched, requests, settings(overlap))
        figures = {
            "step_ms": round(watched.seconds / args.steps * 1e3, 3),
            "host_ms": round((watched.seconds - watched.waited) / args.steps * 1e3, 3),
        }
        if device.type == "cuda":
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            serve(Watched(runner, first, args.steps, profiler), requests, settings(overlap))
            figures["idle"] = round(1 - busy_share(profiler), 4)
        return figures

    measure(True)
    report = {"bench": "engine", **measure(True), "without_overlap": measure(False)}
    print(json.dumps(report | {"machine": machine(), "args": vars(args)}))


if __name__ == "__main__":
    main()
