"""L4, each rank: what an executor is built for, beside its model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from srt.parallel import ParallelContext


@dataclass(frozen=True)
class ExecutorShape:
    num_rows: int  # of its tables
    context_length: int
    pool_tokens: int  # slots of the K/V pool, beside the spare page
    page_size: int
    num_tokens_vocab: int  # tokens that exist, the tokenizer's; the model's vocabulary may be padded beyond them
    kv_dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext = ParallelContext()
    dtype: torch.dtype | None = None  # of what a GPU computes with; K/V's if None
    host_tokens: int = 0  # slots of host memory for evicted prefixes, beside a spare page; 0: there are none
