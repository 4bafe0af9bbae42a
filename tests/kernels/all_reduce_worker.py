"""One rank of `test_all_reduce.py` on a GPU of its own: sums in random order, alone and from CUDA graphs."""

from __future__ import annotations

import os
import random
import sys

import torch

from srt.parallel import Ranks
from srt.rendezvous import meet_on_host

WIDTH = 4096
SIZES = (1, 2, 3, 16, 64, 100, 256, 512)
SUMS = 7
"""Of the largest graph: the smaller ones leave rows in either half."""


def main(rendezvous: str, rank: int, size: int, turns: int) -> None:
    torch.cuda.set_device(rank)
    ranks = Ranks(meet_on_host(rendezvous, size), rank, size, "nccl")
    exchange = ranks.share_memory(WIDTH, torch.bfloat16).exchange
    assert exchange is not None
    weight = torch.rand(WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        # Each rank's part is its rank + 1 times what all ranks know, in float32 sums that are exact.
        known = torch.randint(-8, 9, (512, WIDTH), generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
        parts = [torch.zeros_like(known) for _ in range(SUMS)]
        graphs = []
        for num_rows in SIZES:
            for part in parts:
                exchange.all_reduce(part[:num_rows], weight, 1e-5)  # compiles
            torch.cuda.synchronize()
            for sums in (1, 2, SUMS):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                normed = [exchange.all_reduce(part[:num_rows], weight, 1e-5) for part in parts[:sums]]
                graph.capture_end()
                graphs.append((graph, num_rows, normed))
        choose, wrong = random.Random(3), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(turns):
            graph, num_rows, normed = choose.choice(graphs)
            shift, alone = choose.randrange(512), choose.random() < 0.3
            for index, part in enumerate(parts[: len(normed)]):
                part.copy_(known.roll(shift + index, 0)).mul_(rank + 1)
            if alone:
                normed = [exchange.all_reduce(part[:num_rows], weight, 1e-5) for part in parts[: len(normed)]]
            else:
                graph.replay()
            for index, (part, norm) in enumerate(zip(parts, normed, strict=False)):
                total = known.roll(shift + index, 0).float()[:num_rows] * (size * (size + 1) // 2)
                expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()
                wrong += (part[:num_rows] != total).sum() + (
                    (norm.float() - expected).abs() > 0.01 * expected.abs()
                ).sum()
        torch.cuda.synchronize()
    assert wrong.item() == 0, f"rank {rank}: {wrong.item()} numbers are wrong"
    ranks.gather({})
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
