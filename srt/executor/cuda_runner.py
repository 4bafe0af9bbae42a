"""L4, each rank: the executor of a GPU. Owns the K/V pool, the row tables, the sampler, and the streams they work on.

A step is launched and not waited for: its forward on one stream, the copy of its tokens to the host on another, so that
the next forward follows at once. Decode batches replay CUDA graphs; prompts, alone or mixed with decode rows, graphs of
what lies between two attention calls, up to a size from which on they are launched kernel by kernel.

Shapes: N tokens, B rows, S sampled tokens, V vocabulary, W this rank's part of it, L tokens whose logits are wanted, D
hidden size; R rows and P positions of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from srt.executor.attention.flashinfer import FlashInferBackend
from srt.executor.attention.flashinfer_kernel import HeadShape
from srt.executor.cuda_graph import DecodeGraph, DecodeGraphs
from srt.executor.cuda_sampler import CudaSampler
from srt.executor.forward_batch import ForwardBatch
from srt.executor.host_pool import HostPool
from srt.executor.kv_cache import zeros
from srt.executor.logprobs import LogprobTensors, rate_prompts
from srt.executor.prompt_graph import PromptGraphs
from srt.executor.sampler import Sampled
from srt.executor.shape import ExecutorShape
from srt.executor.spare_plan import no_masks, plan_of_spare_slots
from srt.executor.tables import RowTables
from srt.executor.upload import upload
from srt.kernels import sampling
from srt.kernels.compile_ahead import compiled_ahead
from srt.kernels.edits import Masks
from srt.layers.attention import kv_head_range
from srt.messages import SamplingParams
from srt.model_config import ModelConfig
from srt.models.llama import LlamaForCausalLM
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks

TEMPERATURE_ONLY = SamplingParams(max_new_tokens=1)
FILTERS_ONLY = SamplingParams(max_new_tokens=1, top_p=0.5)
EDITS = SamplingParams(max_new_tokens=1, top_p=0.5, repetition_penalty=2.0, logit_bias=((0, 1.0),))
EVERYTHING = msgspec.structs.replace(EDITS, logprobs=1)
"""Kernels differ by whether logits are drawn from as they are, filtered, or edited before."""


@dataclass
class Launched:
    """A step on its way."""

    plan: ScheduleBatch
    logits_SW: torch.Tensor | None = None  # of the tokens that are sampled, this rank's part
    graph: DecodeGraph | None = None  # whose `draw` would sample them
    rated: LogprobTensors | None = None  # tokens of prompts
    # What its StepResult is made of, once `done`.
    tokens: torch.Tensor | None = None
    logprobs: LogprobTensors | None = None
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CudaRunner:
    def __init__(
        self,
        model: LlamaForCausalLM,
        config: ModelConfig,
        shape: ExecutorShape,
        *,
        most_tokens: int,
        graphs: bool = True,
    ):
        """Allocates the pool. A step computes up to `most_tokens`; without `graphs` it is launched kernel by kernel."""
        device, num_rows = shape.device, shape.num_rows
        self._model = model
        self._device = device
        self._most_tokens = most_tokens
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()  # the tokens of the last step that sampled
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._tables = RowTables(num_rows + 1, shape.context_length, device)
            heads = HeadShape(
                config.num_heads // shape.parallel.size,
                len(kv_head_range(shape.parallel, config.num_kv_heads)),
                config.head_dim,
                shape.page_size,
                shape.dtype or shape.kv_dtype,
                shape.kv_dtype,
            )
            num_slots = shape.pool_tokens + shape.page_size
            kv = zeros((config.num_layers, 2, num_slots, heads.num_kv_heads, heads.head_dim), shape.kv_dtype, device)
            self._host = HostPool(kv, shape.host_tokens, shape.page_size) if shape.host_tokens else None
            self._attention = FlashInferBackend(list(kv), heads, device)
            self._num_tokens = min(shape.num_tokens_vocab, config.vocab_size)
            own_tokens = model.head.own_tokens[: max(self._num_tokens - model.head.own_tokens.start, 0)]
            self._sampler = CudaSampler(num_rows, self._num_tokens, device, shape.parallel, own_tokens)
            self._graphs: DecodeGraphs | None = None
            self._prompts = PromptGraphs(model, self._attention, most_tokens if graphs else 0)
            if graphs:
                pool = torch.cuda.graph_pool_handle()
                self._graphs = DecodeGraphs(model, self._attention, self._sampler, self._tables)
                with compiled_ahead():
                    self._sample_first(num_rows)  # at the head, since filters take longest to compile
                    self._sample_first(1)
                    self._graphs.run_first()
                    self._prompts.run_first()
                self._graphs.capture(pool)
                self._prompts.capture(pool)

    def _sample_first(self, num_rows: int) -> None:
        """With all that sampling can be asked for, and not for its results."""
        assert self._graphs is not None
        all_allowed = no_masks(num_rows, self._num_tokens)
        cases = ((FILTERS_ONLY, None), (FILTERS_ONLY, all_allowed), (EDITS, None), (TEMPERATURE_ONLY, all_allowed))
        for wish, masks in cases:
            plan = plan_of_spare_slots(num_rows, 0, 1, wish)
            self._sampler.open(plan.opened)
            self._sample(Launched(plan, self._graphs.logits_BW[:num_rows]), masks)

    def warm_up(self) -> None:
        """Computes as many tokens as a step may have, in many rows and in few, and all that sampling can be asked for.

        Kernels compile now and not while we serve, and if memory ends, it ends now.
        """
        table_rows, context_length = self._tables.slots_RP.shape
        most_rows = min(table_rows - 1, self._most_tokens)
        cases = [(most_rows, self._most_tokens // most_rows), (1, self._most_tokens)]
        cases += [(num_rows, 1) for num_rows in (2, 32, 64, 128) if num_rows < most_rows]
        for num_rows, length in cases:
            for num_tokens, wish, masks in (
                (min(length, context_length - 1), FILTERS_ONLY, None),
                (1, FILTERS_ONLY, no_masks(num_rows, self._num_tokens)),
                (1, EVERYTHING, None),
            ):
                self._compute(plan_of_spare_slots(num_rows, num_rows // 2, num_tokens, wish), masks)
        for num_rows in (1, most_rows):
            plan = plan_of_spare_slots(num_rows, num_rows, 1, TEMPERATURE_ONLY)
            self._compute(plan, no_masks(num_rows, self._num_tokens))

    def _compute(self, plan: ScheduleBatch, masks: TokenMasks | None) -> None:
        launched = self.forward(plan)
        self.sample(launched, masks)
        self.result(launched)

    def forward(self, batch: ScheduleBatch) -> Launched:
        launched = Launched(batch)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if batch.copies is not None:
                assert self._host is not None
                self._host.copy(batch.copies)
            self._sampler.open(batch.opened)
            if self._graphs is not None and self._graphs.hold(batch):
                graph = self._graphs.forward(batch)
                if batch.num_drafted:
                    (sampled_S,) = upload(self._device, batch.sampled_tokens)
                    launched.logits_SW = self._graphs.logits_BW[sampled_S]
                else:
                    launched.graph, launched.logits_SW = graph, self._graphs.logits_BW[: batch.num_rows]
            else:
                launched.logits_SW, launched.rated = self._forward(batch)
        return launched

    def sample(self, launched: Launched, masks: TokenMasks | None) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if launched.logits_SW is None and launched.rated is None:
                launched.done.record()
                return
            if launched.logits_SW is not None:
                # What these tokens are written over must have reached the host.
                self._stream.wait_event(self._copied)
                sampled = self._sample(launched, masks)
                launched.logits_SW = None
                launched.tokens, launched.logprobs = sampled.tokens_S, sampled.logprobs
            self._copies.wait_stream(self._stream)
            with torch.cuda.stream(self._copies):
                if launched.tokens is not None:
                    launched.tokens = self._to_host(launched.tokens)
                for name in ("logprobs", "rated"):
                    on_device = getattr(launched, name)
                    if on_device is not None:
                        setattr(launched, name, LogprobTensors(*map(self._to_host, on_device)))
                launched.done.record()
                self._copied = launched.done

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """There once the stream of copies is done so far."""
        tensor.record_stream(self._copies)
        return tensor.to("cpu", non_blocking=True)

    def result(self, launched: Launched) -> StepResult:
        launched.done.synchronize()
        tokens = np.zeros(0, np.int32) if launched.tokens is None else launched.tokens.numpy()
        logprobs, prompt = (None if each is None else each.to_arrays() for each in (launched.logprobs, launched.rated))
        return StepResult(tokens, logprobs, prompt)

    def _forward(self, plan: ScheduleBatch) -> tuple[torch.Tensor | None, LogprobTensors | None]:
        """This rank's logits of the tokens that are sampled, or None, and what is said of tokens of prompts."""
        self._tables.apply(plan)
        batch = ForwardBatch.build(plan, self._tables)
        if self._prompts.holds(plan.num_tokens):
            attended = self._prompts.attend(batch)
        else:
            attended = self._model.attend(batch.ids_N, batch.positions_N, self._attention.plan(batch))
        hidden_LD = self._model.finish(*attended, batch.logit_indices)
        rated = rate_prompts(self._model.logits, hidden_LD, batch, self._sampler.wishes, self._num_tokens)
        if batch.num_samples == 0:
            return None, rated
        return self._model.head.of_own(hidden_LD[: batch.num_samples]), rated

    def _sample(self, launched: Launched, masks: TokenMasks | None) -> Sampled:
        plan, logits_SW = launched.plan, launched.logits_SW
        assert logits_SW is not None
        num_sampled = len(logits_SW) if launched.graph is None else launched.graph.size
        on_device = None if masks is None else self._masks(masks, num_sampled)
        only_draws = self._sampler.only_draws(plan)
        if launched.graph is not None and only_draws:
            assert self._graphs is not None
            self._graphs.draw(launched.graph, on_device)
            return Sampled(self._graphs.tokens_B[: plan.num_rows])
        rows_S, positions_S = upload(self._device, plan.sampled_rows, plan.sampled_positions)
        tokens_RP = self._tables.tokens_RP
        if only_draws:
            sampled = Sampled(self._sampler.draw(logits_SW, rows_S, positions_S, on_device))
        else:
            logits_SV = self._model.head.of_all(logits_SW)
            sampled = self._sampler(logits_SV, plan, rows_S, positions_S, tokens_RP, on_device)
        sampling.write_tokens(sampled.tokens_S, rows_S, positions_S, tokens_RP)
        return sampled

    def _masks(self, masks: TokenMasks, num_sampled: int) -> Masks:
        """They go up beside the forward, which still runs."""
        with torch.cuda.stream(self._copies):
            on_device = self._sampler.upload(masks, num_sampled)
        on_device.bits.record_stream(self._stream)
        self._stream.wait_stream(self._copies)
        return on_device
