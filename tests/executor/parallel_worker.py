"""One rank of `test_parallel.py`: for each case, holds a shard, generates for two rows and saves the logits it saw.

Before that the ranks tell each other things, and each saves what it has heard.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import torch
from step_driver import StepDriver

from srt.executor.model_runner import ModelRunner
from srt.executor.shape import ExecutorShape
from srt.messages import SamplingParams
from srt.model_config import ModelConfig, RopeScaling
from srt.models.loader import load_model
from srt.parallel import PAGE, ParallelContext, Ranks
from srt.rendezvous import meet_on_host

LENGTHS = (0, 1, PAGE - 9, PAGE - 8, PAGE - 7, 3, 10 * PAGE)
"""Of what is sent: less than a page, just a page, and more."""


def message(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(meet_on_host(f"{folder}/rendezvous", size), rank, size, "gloo")
    heard = {"gathered": ranks.gather({"rank": rank}), "lengths": []}
    for length in LENGTHS:
        data = message(length)
        if rank == 0:
            ranks.send(data)
        else:
            assert ranks.receive() == data
        heard["lengths"].append(length)
    (folder / f"heard{rank}").write_text(json.dumps(heard))
    for path in sorted(folder.glob("*.json")):
        fields = json.loads(path.read_text())
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        weights = torch.load(path.with_suffix(".weights"), weights_only=True)
        result = generate(ModelConfig(**fields), weights, ranks.context)
        torch.save(result, path.with_suffix(f".rank{rank}"))
    ranks.close()
    os._exit(0)  # as ranks do: threads of gloo's may be busy yet


def generate(config: ModelConfig, weights: dict[str, torch.Tensor], parallel: ParallelContext) -> dict[str, object]:
    device = torch.device("cpu")
    model = load_model(config, weights.items(), torch.float32, device, parallel=parallel)
    logits: list[torch.Tensor] = []
    head = model.logits
    model.logits = lambda x: logits.append(head(x).clone()) or logits[-1].clone()
    runner = ModelRunner(
        model,
        config,
        ExecutorShape(
            num_rows=2,
            context_length=64,
            pool_tokens=128,
            page_size=1,
            num_tokens_vocab=config.vocab_size,
            kv_dtype=torch.float32,
            device=device,
            parallel=parallel,
        ),
    )
    driver = StepDriver(runner, pool_tokens=128, page_size=1)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    tenants = [driver.tenant(row, list(range(3 + row, 20 + row)), greedy) for row in range(2)]
    driver.generate(tenants, 6, chunk=7)
    return {"logits": torch.cat(logits), "tokens": [tenant.tokens for tenant in tenants]}


def save_case(folder: Path, name: str, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    torch.save(weights, folder / f"{name}.weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
