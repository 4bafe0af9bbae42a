"""One rank of `test_parallel.py`: holds a shard, computes every position's logits and saves them."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from step_driver import StepDriver
from tiny_models import VOCAB, hf_model, our_config

from srt.executor.model_runner import ModelRunner
from srt.messages import SamplingParams
from srt.models.loader import load_model
from srt.parallel import ParallelContext


def main(family: str, tied: bool, rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    parallel = ParallelContext(rank, size, dist.group.WORLD)
    model = hf_model(family, tied=tied)
    config, device = our_config(model), torch.device("cpu")
    ours = load_model(config, model.state_dict().items(), torch.float32, device, parallel=parallel)
    logits: list[torch.Tensor] = []
    head = ours.logits
    ours.logits = lambda x: logits.append(head(x).clone()) or logits[-1].clone()
    runner = ModelRunner(
        ours,
        config,
        num_rows=2,
        context_length=64,
        pool_tokens=128,
        page_size=1,
        num_tokens_vocab=VOCAB,
        kv_dtype=torch.float32,
        device=device,
        parallel=parallel,
    )
    driver = StepDriver(runner, pool_tokens=128, page_size=1)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    tenants = [driver.tenant(row, list(range(3 + row, 20 + row)), greedy) for row in range(2)]
    driver.generate(tenants, 6, chunk=7)
    torch.save({"logits": torch.cat(logits), "tokens": [t.tokens for t in tenants]}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "tied", int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
