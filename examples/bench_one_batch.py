"""Times prefill and decode steps of the executor alone, with random weights, and prints one line of JSON.

Prefill: `--prompts` prompts of `--prompt` tokens in steps of at most `--chunk` tokens. Decode: `--rows` requests, each
with `--context` tokens cached when it begins, `--steps` steps, each launched before the last is waited for.
Times are medians over `--repeats` in milliseconds: of all prompts, and of one step.

The roofline is what the same machine does in the same run: `read_gb_s`, the rate at which it reads memory, bounds a
decode step by weights and K/V, and on a GPU `gemm_tflop_s`, its rate in a large bfloat16 product, bounds a prefill. The
ratios say which share of the time these least times would take.

    python -m examples.bench_one_batch --rows 16 --context 192 --prompt 128
    python -m examples.bench_one_batch --device cuda --model llama-3.1-8b --rows 64 --context 1024 --prompt 8192

With `--tp-size` so many processes share the model, on a GPU each; rank 0 reports, and the roofline is of one's share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.host import device_name
from examples.model_shapes import SHAPES
from srt.executor.shape import ExecutorShape
from srt.executor.weights import iterate_weights
from srt.messages import SamplingParams
from srt.model_config import ModelConfig
from srt.model_files import ModelFiles
from srt.models.loader import load_model
from srt.parallel import ParallelContext, Ranks
from srt.rendezvous import meet_on_host
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch
from srt.transport import Endpoints
from srt.weight_names import weight_shapes


class Driver:
    """Plans steps as the scheduler would, of requests that all start and grow together."""

    def __init__(
        self, runner: Any, config: ModelConfig, context_length: int, pool_tokens: int, sampling: SamplingParams
    ):
        self._runner = runner
        self._vocab_size = config.vocab_size
        self._sampling = sampling
        free = np.random.default_rng(0).permutation(np.arange(1, pool_tokens + 1)).astype(np.int32)
        self._slots = free[: pool_tokens // context_length * context_length].reshape(-1, context_length)

    def open(self, rows: int, length: int) -> tuple[OpenedRow, ...]:
        tokens = np.random.default_rng(1).integers(0, self._vocab_size, (rows, length)).astype(np.int32)
        return tuple(OpenedRow(row, tokens[row], length, self._sampling, ()) for row in range(rows))

    def step(
        self,
        row: np.ndarray,
        start: np.ndarray,
        length: np.ndarray,
        samples: np.ndarray,
        decode: bool,
        opened: tuple = (),
    ) -> ScheduleBatch:
        end = start + length
        slots = [self._slots[r, s:e] for r, s, e in zip(row, start, end, strict=True)]
        arrays = (a.astype(np.int32) for a in (row, start, length, end - samples))
        num_decode = len(row) if decode else 0
        samples = samples.astype(np.int32)
        return ScheduleBatch(0, opened, num_decode, *arrays, samples, start.astype(np.int32), np.concatenate(slots))

    def prefill(self, prompts: int, length: int, chunk: int) -> list[ScheduleBatch]:
        """Whole and partial prompts in steps of `chunk` tokens."""
        plans, left = [], [[row, 0] for row in range(prompts)]
        while left:
            parts, budget = [], chunk
            while left and budget:
                row, done = left[0]
                size = min(budget, length - done)
                parts.append((row, done, size, done + size == length))
                left[0][1] += size
                budget -= size
                if left[0][1] == length:
                    left.pop(0)
            row, start, size, last = (np.array(column) for column in zip(*parts, strict=True))
            plans.append(self.step(row, start, size, last, False, () if plans else self.open(prompts, length)))
        return plans

    def decode(self, rows: int, context: int, steps: int) -> list[ScheduleBatch]:
        row, ones = np.arange(rows), np.ones(rows, np.int32)
        return [self.step(row, row * 0 + context + i, ones, ones > 0, True) for i in range(steps)]

    def run(self, plans: list[ScheduleBatch]) -> float:
        """Milliseconds for all, each launched before the one before it is waited for."""
        runner, previous = self._runner, None
        begin = time.perf_counter()
        for plan in plans:
            launched = runner.forward(plan)
            if previous is not None:
                runner.result(previous)
            runner.sample(launched, None)
            previous = launched
        runner.result(previous)
        return (time.perf_counter() - begin) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3)}


def best_seconds(work: Callable[[], Any], device: torch.device, times: int = 8) -> float:
    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return min(once() for _ in range(times))


def read_bandwidth(device: torch.device) -> float:
    """GB/s, of a maximum over 4 GiB on a GPU and a sum over 512 MiB on a CPU."""
    if device.type == "cpu":
        data = torch.ones(2**27)
        return data.nbytes / best_seconds(data.sum, device) / 1e9
    data = torch.randn(2**31, dtype=torch.bfloat16, device=device).view(torch.int32)
    return data.nbytes / best_seconds(data.amax, device) / 1e9


def gemm_rate(device: torch.device) -> float:
    """TFLOP/s of a bfloat16 product of random 8192 x 8192 matrices, ten at a time."""
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))

    def ten() -> None:
        for _ in range(10):
            a @ b

    return 10 * 2 * 8192**3 / best_seconds(ten, device) / 1e12


def linear_weights(config: ModelConfig) -> tuple[int, int]:
    """Elements that a decode step reads: of the body, and of the head. The embedding is looked up, not read."""
    shapes = weight_shapes(config)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    vocabulary = config.vocab_size * config.hidden_size
    return total - vocabulary * (1 if config.tie_word_embeddings else 2), vocabulary


def make_runner(config: ModelConfig, shape: ExecutorShape, args: argparse.Namespace) -> Any:
    files = ModelFiles("bench", Path(), Path(), "dummy", None, config)
    weights = iterate_weights(files, shape.kv_dtype, device=shape.device)
    place = {"context_length": shape.context_length, "parallel": shape.parallel}
    model = load_model(config, weights, shape.kv_dtype, shape.device, **place)
    if shape.device.type == "cpu":
        from srt.executor.model_runner import ModelRunner

        return ModelRunner(model, config, shape)
    from srt.executor.cuda_runner import CudaRunner

    runner = CudaRunner(model, config, shape, most_tokens=args.chunk, graphs=not args.no_graphs)
    runner.warm_up()
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--device", type=device_name, default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="batch sizes of decode, one after the other")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--follow", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()

    torch.set_num_threads(max(args.threads // args.tp_size, 1))
    if args.follow:
        run_rank(args, args.follow[0], int(args.follow[1]))
    elif args.tp_size == 1:
        print(json.dumps(measure(args, torch.device(args.device), ParallelContext())))
    else:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            command = [sys.executable, "-m", "examples.bench_one_batch", *sys.argv[1:], "--follow", folder]
            followers = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.tp_size)]
            try:
                print(json.dumps(run_rank(args, folder, 0)), flush=True)
            finally:
                for follower in followers:
                    follower.kill()
    sys.stdout.flush()
    os._exit(0)  # NCCL would wait for graphs that are still there


def run_rank(args: argparse.Namespace, folder: str, rank: int) -> dict[str, Any]:
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if args.device == "cuda" else "gloo"
    ranks = Ranks(meet_on_host(Endpoints(folder).rendezvous, args.tp_size), rank, args.tp_size, backend)
    parallel = ranks.context
    if args.device == "cuda":
        parallel = ranks.share_memory(SHAPES[args.model]["hidden_size"], getattr(torch, args.dtype))
    report = measure(args, device, parallel)
    ranks.gather({})  # whoever ends early takes others with it
    return report


def measure(args: argparse.Namespace, device: torch.device, parallel: ParallelContext) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    config = ModelConfig.from_hf(SHAPES[args.model])
    begin = time.perf_counter()
    context_length = -(-max(args.context + args.steps, args.prompt) // args.page_size) * args.page_size + args.page_size
    num_rows = max(*args.rows, args.prompts)
    pool_tokens = num_rows * context_length
    shape = ExecutorShape(
        num_rows,
        context_length,
        pool_tokens,
        args.page_size,
        config.vocab_size,
        kv_dtype=dtype,
        device=device,
        parallel=parallel,
    )
    runner = make_runner(config, shape, args)
    report: dict[str, Any] = {"model": args.model, "device": args.device, "dtype": args.dtype}
    if parallel.size > 1:
        report["tp_size"] = parallel.size
    report["ready_s"] = round(time.perf_counter() - begin, 2)
    sampling = SamplingParams(max_new_tokens=1, temperature=args.temperature)
    driver = Driver(runner, config, context_length, pool_tokens, sampling)

    body, head = (elements // parallel.size for elements in linear_weights(config))
    read_gb_s = read_bandwidth(device)
    report["read_gb_s"] = round(read_gb_s, 1)
    prefill = driver.prefill(args.prompts, args.prompt, args.chunk)
    driver.run(prefill)
    times = [driver.run(prefill) for _ in range(args.repeats)]
    num_tokens = args.prompts * args.prompt
    report["prefill"] = {"prompts": args.prompts, "prompt": args.prompt, "ms": summary(times)}
    report["prefill"]["tokens_s"] = round(num_tokens / statistics.median(times) * 1e3)
    if device.type == "cuda":
        rate = gemm_rate(device)
        report["gemm_tflop_s"] = round(rate, 1)
        attention = 2 * args.prompts * args.prompt**2 * config.num_layers * config.num_heads * config.head_dim
        flops = 2 * (num_tokens * body + args.prompts * head) + attention // parallel.size
        report["prefill"]["roofline"] = round(flops / rate / 1e9 / statistics.median(times), 3)

    report["decode"] = []
    for rows in args.rows:
        decode = driver.decode(rows, args.context, args.steps)
        opening = driver.step(
            *(np.arange(rows), np.zeros(rows, int), np.full(rows, args.context), np.ones(rows, bool), False)
        )
        for first in range(0, rows, max(args.chunk // args.context, 1)):  # K/V as after a prompt, in steps that fit
            some = slice(first, first + max(args.chunk // args.context, 1))
            part = (opening.row[some], opening.start[some], opening.length[some], opening.samples[some])
            driver.run([driver.step(*part, False, () if first else driver.open(rows, args.context))])
        driver.run(decode)
        times = [driver.run(decode) / args.steps for _ in range(args.repeats)]
        cached = rows * (args.context + args.steps / 2) * config.kv_elements_per_rank(parallel.size)
        least_ms = (body + head + cached) * dtype.itemsize / read_gb_s / 1e6
        result = {"rows": rows, "context": args.context, "step_ms": summary(times), "least_ms": round(least_ms, 3)}
        report["decode"].append(result | {"roofline": round(least_ms / statistics.median(times), 3)})
    return report


if __name__ == "__main__":
    main()
