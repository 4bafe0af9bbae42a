"""Times one prefill and one decode step of the executor alone, with random weights, and prints one line of JSON.

Decode: `--rows` requests, each with `--context` tokens cached. Prefill: one prompt of `--prompt` tokens. Times are the
median and the least of `--steps` steps in milliseconds; `read_gb_s` is what this machine reads from memory in the same
run, and `roofline` the share of the least decode time that reading weights and K/V at this rate would take.

    python examples/bench_one_batch.py --rows 16 --context 192 --prompt 128
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from srt.executor.model_runner import ModelRunner
from srt.messages import SamplingParams
from srt.model_config import ModelConfig, RopeScaling
from srt.models.loader import load_model
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch
from srt.weight_names import weight_shapes

SHAPES = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=RopeScaling(),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=(),
)
"""SmolLM2-135M's."""


def random_weights() -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    for name, shape in weight_shapes(SHAPES).items():
        yield name, torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02


def open_row(row: int, length: int, sampling: SamplingParams) -> OpenedRow:
    tokens = np.random.default_rng(row).integers(0, SHAPES.vocab_size, length)
    return OpenedRow(row, tokens.astype(np.int32), length, sampling, ())


def batch(opened: list[OpenedRow], num_decode: int, start: list[int], length: list[int], slots: list) -> ScheduleBatch:
    """`slots[i]` are row i's new entries of the slot table, which end at its last position."""
    end = np.array(start, np.int32) + np.array(length, np.int32)
    counts = np.array([len(entries) for entries in slots], np.int32)
    return ScheduleBatch(
        step=0,
        opened=tuple(opened),
        num_decode=num_decode,
        row=np.arange(len(start), dtype=np.int32),
        start=np.array(start, np.int32),
        length=np.array(length, np.int32),
        first_logit=end - 1,
        samples=np.ones(len(start), bool),
        table_start=end - counts,
        slots=np.concatenate(slots).astype(np.int32),
    )


def timed(runner: ModelRunner, plan: ScheduleBatch) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    launched = runner.forward(plan)
    runner.sample(launched, None)
    runner.result(launched)
    return (time.perf_counter() - begin) * 1e3


def summary(run: Callable[[], float], steps: int) -> dict[str, float]:
    run()
    times = [run() for _ in range(steps)]
    return {"median": round(statistics.median(times), 2), "min": round(min(times), 2)}


def read_bandwidth() -> float:
    """GB/s, of a sum over 512 MiB."""
    data = torch.ones(2**27)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return data.nbytes / min(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    dtype, device = getattr(torch, args.dtype), torch.device("cpu")
    context_length = max(args.context, args.prompt) + 1
    model = load_model(SHAPES, random_weights(), dtype, device, context_length=context_length)
    pool_tokens = (args.rows + 1) * context_length
    runner = ModelRunner(
        model,
        SHAPES,
        num_rows=args.rows,
        context_length=context_length,
        pool_tokens=pool_tokens,
        page_size=1,
        num_tokens_vocab=SHAPES.vocab_size,
        kv_dtype=dtype,
        device=device,
    )
    sampling = SamplingParams(max_new_tokens=1, temperature=args.temperature)
    free = np.random.default_rng(0).permutation(np.arange(1, pool_tokens + 1))

    opened = open_row(0, args.prompt, sampling)
    prefill = batch([opened], 0, [0], [args.prompt], [free[: args.prompt]])
    prefill_ms = summary(lambda: timed(runner, prefill), args.steps)

    rows = [open_row(row, args.context + 1, sampling) for row in range(args.rows)]
    slots = list(free[: args.rows * (args.context + 1)].reshape(args.rows, -1))
    timed(runner, batch(rows, args.rows, [args.context] * args.rows, [1] * args.rows, slots))
    none = [np.zeros(0, np.int32)] * args.rows
    decode = batch([], args.rows, [args.context] * args.rows, [1] * args.rows, none)
    decode_ms = summary(lambda: timed(runner, decode), args.steps)

    weights = sum(int(np.prod(shape)) for shape in weight_shapes(SHAPES).values())
    cached = args.rows * args.context * SHAPES.kv_elements_per_token
    read_gb_s = read_bandwidth()
    least_ms = (weights + cached) * dtype.itemsize / read_gb_s / 1e6
    print(
        json.dumps(
            {
                "dtype": args.dtype,
                "threads": args.threads,
                "rows": args.rows,
                "context": args.context,
                "prompt": args.prompt,
                "prefill_ms": prefill_ms,
                "decode_ms": decode_ms,
                "read_gb_s": round(read_gb_s, 1),
                "roofline": round(least_ms / decode_ms["min"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
