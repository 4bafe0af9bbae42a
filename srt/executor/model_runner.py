"""L4, each rank: the executor. Owns the K/V pool, the row tables and the sampler; computes the plans it is given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from srt.executor.attention.torch_native import TorchNativeBackend
from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.executor.logprobs import LogprobTensors, rate_prompts
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
    rated: LogprobTensors | None = None  # tokens of prompts
    done: bool = False


class ModelRunner:
    """The `Executor` of a CPU: steps queue up and are computed in order when a result is waited for.

    So a scheduler that plans ahead works as it does beside a GPU. But nothing runs at the same time as it, so it gains
    nothing by that.
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
            dtype=torch.float16 if shape.kv_dtype == torch.bfloat16 else shape.kv_dtype,
            device=device,
            host_tokens=shape.host_tokens,
        )
        self._attention = TorchNativeBackend(self._cache)
        self._sampling = SamplingTable(shape.num_rows)
        self._num_tokens = min(shape.num_tokens_vocab, config.vocab_size)
        self._sampler = Sampler(self._sampling, self._num_tokens)
        self._queue: deque[Launched] = deque()

    def take_model(self, model: LlamaForCausalLM) -> None:
        """Another one of the same shapes, with nothing in flight."""
        self._model = model

    def forward(self, batch: ScheduleBatch) -> Launched:
        launched = Launched(batch)
        self._queue.append(launched)
        return launched

    def sample(self, launched: Launched, masks: TokenMasks | None) -> None:
        launched.masks = masks

    def result(self, launched: Launched) -> StepResult:
        while not launched.done:
            self._execute(self._queue.popleft())
        prompt = None if launched.rated is None else launched.rated.to_arrays()
        if launched.sampled is None:
            return StepResult(np.zeros(0, np.int32), prompt=prompt)
        tokens, logprobs = launched.sampled.tokens_S.int().numpy(), launched.sampled.logprobs
        return StepResult(tokens, None if logprobs is None else logprobs.to_arrays(), prompt)

    def _execute(self, launched: Launched) -> None:
        plan = launched.plan
        with torch.inference_mode():
            for opened in plan.opened:
                self._sampling.open(opened)
            self._tables.apply(plan)
            if plan.copies is not None:
                self._cache.copy(plan.copies)
            batch = ForwardBatch.build(plan, self._tables)
            attend = self._attention.plan(batch)
            hidden_LD = self._model.forward(batch.ids_N, batch.positions_N, attend, batch.logit_indices)
            launched.rated = rate_prompts(self._model.logits, hidden_LD, batch, self._sampling.wishes, self._num_tokens)
            if batch.num_samples:
                logits_SV = self._model.logits(hidden_LD[: batch.num_samples])
                launched.sampled = self._sample(batch, logits_SV, launched.masks)
        launched.done = True

    def _sample(self, batch: ForwardBatch, logits_SV: torch.Tensor, masks: TokenMasks | None) -> Sampled:
        sampled = self._sampler(logits_SV, batch.plan, self._tables.tokens_RP, masks)
        self._tables.write_tokens(batch.plan, sampled.tokens_S)
        return sampled
