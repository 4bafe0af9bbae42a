"""What the policies make of a mixed queue on this machine's CPU: as `mixed` of bench_cache, but everything is computed.

    python -m examples.bench_policies

64 families of 4 prompts at once, 256 tokens in common, 32 of their own, 8 to generate, and a pool for 32 requests; a
model of the default one's shape with random weights. Prints one JSON line, whose names are those of bench_cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from examples.bench_cache import CPU_BUDGET, CPU_ROWS, compare_policies
from examples.host import machine
from examples.model_shapes import SHAPES
from examples.simulated_engine import CONTEXT, VOCABULARY, Run, run
from examples.workloads import shared_prefix
from srt.executor.model_runner import Launched, ModelRunner
from srt.executor.shape import ExecutorShape
from srt.executor.weights import iterate_weights
from srt.model_config import ModelConfig
from srt.model_files import ModelFiles
from srt.models.llama import LlamaForCausalLM
from srt.models.loader import load_model
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks

DTYPE, CPU = torch.bfloat16, torch.device("cpu")


class TimedRunner:
    """The executor of a CPU; its clock is the wall's."""

    def __init__(self, model: LlamaForCausalLM, config: ModelConfig, pool_tokens: int) -> None:
        shape = ExecutorShape(CPU_ROWS, CONTEXT, pool_tokens, 1, VOCABULARY, kv_dtype=DTYPE, device=CPU)
        self.steps = 0
        self._runner = ModelRunner(model, config, shape)
        self._begin = time.perf_counter()

    @property
    def clock(self) -> float:
        return time.perf_counter() - self._begin

    def forward(self, batch: ScheduleBatch) -> Launched:
        self.steps += 1
        return self._runner.forward(batch)

    def sample(self, launched: Launched, masks: TokenMasks | None) -> None:
        self._runner.sample(launched, masks)

    def result(self, launched: Launched) -> StepResult:
        return self._runner.result(launched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=64)
    args = parser.parse_args()
    common, own, output = 256, 32, 8
    pool = 32 * (common + own + output)
    chats = shared_prefix(
        1, groups=args.families, prompts_per_group=4, system_len=common, question_len=own, output_len=output,
        ordered=False,
    )  # fmt: skip
    config = ModelConfig.from_hf(SHAPES["smollm2-135m"])
    model = load_model(
        config, iterate_weights(ModelFiles("bench", Path(), Path(), "dummy", None, config), DTYPE), DTYPE, CPU
    )

    def of(policy: str) -> Run:
        device: Any = TimedRunner(model, config, pool)
        return run(chats, policy, pool, len(chats), rows=CPU_ROWS, token_budget=CPU_BUDGET, device=device)

    figures = compare_policies(("fcfs", "lpm"), of)
    print(json.dumps({"benchmark": "policies", **machine(), "mixed": figures, "args": vars(args)}))


if __name__ == "__main__":
    main()
