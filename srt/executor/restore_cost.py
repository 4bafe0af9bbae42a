"""L4, each rank: from how many tokens on it is quicker to copy K/V back from host memory than to compute it again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from srt.executor.spare_plan import plan_of_spare_slots
from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import Copies

MEASURED_TOKENS = 256
if TYPE_CHECKING:
    from srt.executor.cuda_runner import CudaRunner
    from srt.executor.model_runner import ModelRunner

NEVER = 2**30
_GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0)
_TIMES = 3


def restore_least(executor: ModelRunner | CudaRunner, num_tokens: int, page_size: int) -> int:
    """Measured with `num_tokens` of an empty pool: a copy costs something by itself and something for each token."""
    least = _seconds(executor, 1, 0, page_size)
    fixed = _seconds(executor, 1, 1, page_size) - least
    copying = _seconds(executor, 1, num_tokens, page_size) - least
    computing = _seconds(executor, num_tokens, 0, page_size) - least
    return least_worth_copying(max(fixed, 0.0), max(copying, 0.0) / num_tokens, computing / num_tokens)


def least_worth_copying(fixed: float, copying: float, computing: float) -> int:
    """The least n with fixed + n copying < n computing, all in seconds; NEVER if there is none."""
    if copying >= computing:
        return NEVER
    return min(NEVER, int(fixed / (computing - copying)) + 1)


def _seconds(executor: ModelRunner | CudaRunner, num_computed: int, num_copied: int, page_size: int) -> float:
    """The quickest of some steps."""
    slots = np.arange(page_size, page_size + num_copied, dtype=np.int32)
    nothing = slots[:0]
    copies = Copies(nothing, nothing, slots, slots) if num_copied else None
    plan = replace(plan_of_spare_slots(1, 0, num_computed, _GREEDY), copies=copies)
    best = float("inf")
    for _ in range(_TIMES):
        begin = time.perf_counter()
        launched = executor.forward(plan)
        executor.sample(launched, None)
        executor.result(launched)
        best = min(best, time.perf_counter() - begin)
    return best
