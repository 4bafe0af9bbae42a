"""Times the GPU kernels of a decode step at the shapes of two models, and prints one line of JSON.

Each kernel runs in a CUDA graph, many times over, with as many copies of its weights that no cache helps. `us` is the
time of one call in microseconds, `bytes` what it must read and write, and `share` bytes / `us` over the read bandwidth
that this GPU shows in the same run (`read_gb_s`, the maximum over 4 GB). `layer` is a decoder layer's launches one
after the other, without attention; `cublas` are the products as torch computes them.

    python -m examples.bench_kernels --rows 1 4 16 64
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from srt.kernels import decode_inputs
from srt.kernels.activation import silu_and_mul
from srt.kernels.linear import MOST_TOKENS, small_batch_linear, takes_norm
from srt.kernels.norm import rms_norm
from srt.kernels.rope import rotate_and_store
from srt.kernels.sampling import gumbel_argmax
from srt.kernels.swiglu_product import swiglu_linear

COLD = 600_000_000
"""Bytes of weights that a rotation passes through: ten times the largest L2."""

CONTEXT = 1024
EPS = 1e-5


@dataclass(frozen=True)
class Shapes:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


MODELS = (
    Shapes("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
    Shapes("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def microseconds(call: Callable[[int], object], sets: int, graph_calls: int = 60) -> float:
    """Of one `call(index of a set)` in a replayed graph; the median of 5 replays."""
    calls = max(graph_calls // sets, 1) * sets
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(calls):
                call(index % sets)
        times = []
        for _ in range(6):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[1:])


def read_bandwidth() -> float:
    """Bytes per microsecond."""
    data = torch.rand(2**30, device="cuda")
    return data.nbytes / microseconds(lambda _: data.amax(), 1, graph_calls=4)


Case = tuple[str, int, Callable[[int], object], int]
"""Kernel, bytes, call, sets."""


def products(shapes: Shapes, rows: int) -> Iterator[Case]:
    for name, (outputs, inputs) in shapes.products.items():
        sets = max(COLD // (2 * outputs * inputs), 1) + 1
        weights = [randn(outputs, inputs) for _ in range(sets)]
        x = randn(rows, inputs)
        size = 2 * (outputs * inputs + rows * (inputs + outputs))
        yield f"cublas {name}", size, lambda i, x=x, w=weights: F.linear(x, w[i]), sets
        if rows <= MOST_TOKENS:
            yield f"linear {name}", size, lambda i, x=x, w=weights: small_batch_linear(x, w[i]), sets


def layer(shapes: Shapes, rows: int) -> Iterator[Case]:
    names = ("qkv", "o", "gate_up", "down")
    size = 2 * sum(shapes.products[name][0] * shapes.products[name][1] for name in names)
    sets = COLD // size + 1
    weights = {
        name: [randn(*shapes.products[name]) / shapes.products[name][1] ** 0.5 for _ in range(sets)] for name in names
    }
    scale = randn(shapes.hidden)
    residual, turns = randn(rows, shapes.hidden), torch.rand((CONTEXT, 2, shapes.head_dim // 2), device="cuda")
    places = torch.arange(rows, device="cuda")
    cache = randn(2, rows, shapes.kv_heads, shapes.head_dim)

    def rotate(qkv: torch.Tensor) -> torch.Tensor:
        q = rotate_and_store(qkv.view(rows, -1, shapes.head_dim), turns, places, places, cache)
        return q.view(rows, -1)

    def apart(i: int) -> None:
        attended = rotate(F.linear(rms_norm(residual, scale, EPS), weights["qkv"][i]))
        residual.addmm_(attended, weights["o"][i].T)
        gate_up = F.linear(rms_norm(residual, scale, EPS), weights["gate_up"][i])
        residual.addmm_(silu_and_mul(gate_up), weights["down"][i].T)

    def of_normed(weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
        if takes_norm(rows, *weight.shape):
            return small_batch_linear(residual, weight, norm=(scale, EPS), gated=gated)
        return small_batch_linear(rms_norm(residual, scale, EPS), weight, gated=gated)

    def fused(i: int) -> None:
        attended = rotate(of_normed(weights["qkv"][i]))
        small_batch_linear(attended, weights["o"][i], out_NO=residual, adds=True)
        gated = of_normed(weights["gate_up"][i], gated=True)
        small_batch_linear(gated, weights["down"][i], out_NO=residual, adds=True)

    def of_many(i: int) -> None:
        attended = rotate(F.linear(rms_norm(residual, scale, EPS), weights["qkv"][i]))
        residual.addmm_(attended, weights["o"][i].T)
        residual.addmm_(swiglu_linear(rms_norm(residual, scale, EPS), weights["gate_up"][i]), weights["down"][i].T)

    yield "layer, cublas", size, apart, sets
    yield "layer, fused", size, fused if rows <= MOST_TOKENS else of_many, sets


def others(shapes: Shapes, rows: int) -> Iterator[Case]:
    x, scale = randn(rows, shapes.hidden), randn(shapes.hidden)
    yield "rms_norm", 4 * x.numel(), lambda _: rms_norm(x, scale, EPS), 1

    gate_up = randn(rows, 2 * shapes.intermediate)
    yield "silu_and_mul", 3 * gate_up.numel(), lambda _: silu_and_mul(gate_up), 1

    qkv = randn(rows, shapes.heads + 2 * shapes.kv_heads, shapes.head_dim)
    turns = torch.rand((CONTEXT, 2, shapes.head_dim // 2), device="cuda")
    cache = randn(2, rows * CONTEXT, shapes.kv_heads, shapes.head_dim)
    places = torch.arange(rows, device="cuda")
    norms = randn(shapes.head_dim), randn(shapes.head_dim)
    yield "rotate_and_store", 4 * qkv.numel(), lambda _: rotate_and_store(qkv, turns, places, places, cache, *norms), 1

    slots = torch.arange(rows * CONTEXT, dtype=torch.int32, device="cuda").view(rows, CONTEXT)
    lengths = torch.full((rows,), CONTEXT, device="cuda")
    ids, positions, to = (torch.empty(rows, dtype=torch.int64, device="cuda") for _ in range(3))
    indptr, last = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (rows + 1, rows))
    indices = torch.empty(rows * CONTEXT, dtype=torch.int32, device="cuda")
    yield "gather", 48 * rows, lambda _: decode_inputs.gather(places, lengths, slots, slots, ids, positions, to), 1
    fill = (places, lengths, slots, 1, indptr, indices, last)
    yield "page_table", 8 * slots.numel(), lambda _: decode_inputs.page_table(*fill), 1

    sets = COLD // (4 * rows * shapes.vocab) + 1
    logits = [randn(rows, shapes.vocab).float() for _ in range(min(sets, 64))]
    for temperature in (0.0, 0.6):
        t = torch.full((rows,), temperature, device="cuda")
        name, size = f"gumbel_argmax T={temperature:g}", 4 * rows * shapes.vocab
        yield name, size, lambda i, t=t: gumbel_argmax(logits[i], t, lengths, lengths, shapes.vocab), len(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    results = []
    for shapes in MODELS:
        for rows in args.rows:
            for cases in (products, layer, others):
                for kernel, size, call, sets in cases(shapes, rows):
                    try:
                        us = microseconds(call, sets)
                    except RuntimeError as error:
                        raise RuntimeError(f"{shapes.name}, {rows} rows, {kernel}") from error
                    results.append(
                        {
                            "model": shapes.name,
                            "kernel": kernel,
                            "rows": rows,
                            "us": round(us, 2),
                            "bytes": size,
                            "share": round(size / us / bandwidth, 3),
                        }
                    )
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"gpu": gpu, "read_gb_s": round(bandwidth / 1e3), "kernels": results}))


if __name__ == "__main__":
    main()
