"""L4, each rank: the executor. Owns the K/V pool, the row tables and the sampler; computes the plans it is given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from srt.executor.attention.torch_native import TorchNativeBackend
from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.executor.sampler import Sampled, Sampler
from srt.executor.sampling_table import SamplingTable
from srt.executor.shape import ExecutorShape
from srt.executor.tables import RowTables
from srt.layers.attention import kv_head_range
from srt.model_config import ModelConfig
from srt.models.llama import LlamaForCausalLM
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks


@dataclass
class Launched:
    """A step on its way."""

    plan: ScheduleBatch
    masks: TokenMasks | None = None
    sampled: Sampled | None = None
    done: bool = False


class ModelRunner:
    """The `Executor` of a CPU: steps queue up and are computed in order when a result is waited for.

    So the scheduler plans and commits exactly as it does beside a GPU, and nothing runs at the same time as it.
    """

    def __init__(self, model: LlamaForCausalLM, config: ModelConfig, shape: ExecutorShape):
        """Allocates the pool."""
        device = shape.device
        self._model = model
        self._tables = RowTables(shape.num_rows, shape.context_length, device)
        self._cache = KVCache(
            num_layers=config.num_layers,
            pool_tokens=shape.pool_tokens,
            page_size=shape.page_size,
            num_kv_heads=len(kv_head_range(shape.parallel, config.num_kv_heads)),
            head_dim=config.head_dim,
            # A CPU only stores in this type, and float16 keeps three more bits than bfloat16.
            dtype=torch.float16 if device.type == "cpu" and shape.kv_dtype == torch.bfloat16 else shape.kv_dtype,
            device=device,
        )
        self._attention = TorchNativeBackend(self._cache)
        self._sampling = SamplingTable(shape.num_rows)
        self._sampler = Sampler(self._sampling, min(shape.num_tokens_vocab, config.vocab_size), device)
        self._queue: deque[Launched] = deque()

    def forward(self, batch: ScheduleBatch) -> Launched:
        launched = Launched(batch)
        self._queue.append(launched)
        return launched

    def sample(self, launched: Launched, masks: TokenMasks | None) -> None:
        launched.masks = masks

    def result(self, launched: Launched) -> StepResult:
        while not launched.done:
            self._execute(self._queue.popleft())
        return to_step_result(launched.sampled)

    def _execute(self, launched: Launched) -> None:
        plan = launched.plan
        with torch.inference_mode():
            for opened in plan.opened:
                self._sampling.open(opened)
            self._tables.apply(plan)
            if plan.num_rows:
                batch = ForwardBatch.build(plan, self._tables)
                attend = self._attention.plan(batch)
                hidden_LD = self._model.forward(batch.ids_N, batch.positions_N, attend, batch.logit_indices)
                if len(batch.logit_indices):
                    logits_LV = self._model.logits(hidden_LD)
                    if len(batch.sample_logits):
                        launched.sampled = self._sample(batch, logits_LV, launched.masks)
        launched.done = True

    def _sample(self, batch: ForwardBatch, logits_LV: torch.Tensor, masks: TokenMasks | None) -> Sampled:
        all_sample = len(batch.sample_logits) == len(logits_LV)
        logits_SV = logits_LV if all_sample else logits_LV[batch.sample_logits]
        sampled = self._sampler(logits_SV, batch.plan, self._tables.tokens_RP, masks)
        self._tables.write_tokens(batch.plan, sampled.tokens_S)
        return sampled


def to_step_result(sampled: Sampled | None) -> StepResult:
    if sampled is None:
        return StepResult(np.zeros(0, np.int32))
    tokens = sampled.tokens_S.to(torch.int32).cpu().numpy()
    if sampled.logprobs_S is None or sampled.top_ids_SK is None or sampled.top_logprobs_SK is None:
        return StepResult(tokens)
    return StepResult(
        tokens,
        sampled.logprobs_S.cpu().numpy(),
        sampled.top_ids_SK.to(torch.int32).cpu().numpy(),
        sampled.top_logprobs_SK.cpu().numpy(),
    )
