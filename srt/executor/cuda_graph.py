"""L4, each rank: CUDA graphs of decode steps, one pair per batch size: the forward, and the draw of its tokens.

A graph begins with gathering its tokens, positions and slots from the row tables and ends with the new tokens in them,
so a step costs the host one small upload and two launches. A batch takes the next larger size; the rows that are too
many work on a spare row of the tables and the spare page.

Shapes: B rows of a graph, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from srt.executor.attention.flashinfer import FewRowsPart, FlashInferBackend, StepAttention
from srt.executor.attention.flashinfer_kernel import Kernel, Pages, splits
from srt.executor.cuda_sampler import CudaSampler
from srt.executor.tables import RowTables
from srt.kernels import decode_attention, decode_inputs, sampling
from srt.models.llama import LlamaForCausalLM
from srt.scheduler.schedule_batch import ScheduleBatch

FIXED_SCHEDULE = 1 << 16
"""Bytes for a schedule that never changes; FlashInfer's takes a few words per block."""


def graph_sizes(most_rows: int) -> list[int]:
    """Close together where a step is bound by the launches and weights that small batches share, then by 16."""
    ladder = [1, 2, 3, 4, *range(6, 33, 2), *range(40, 65, 8), *range(80, most_rows + 16, 16)]
    return [size for size in ladder if size < most_rows] + [most_rows]


@dataclass
class DecodeGraph:
    size: int
    kernel: Kernel | None  # FlashInfer's, if it is used: its schedule lives as long as the graph
    planned_each_step: bool
    forward: torch.cuda.CUDAGraph
    draw: torch.cuda.CUDAGraph


class DecodeGraphs:
    """`logits_BV` and `tokens_B` hold what was launched last; a later launch overwrites them, in the stream's order."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        attention: FlashInferBackend,
        sampler: CudaSampler,
        tables: RowTables,
        vocab_size: int,
        dtype: torch.dtype,
    ):
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._tables = tables
        spare_row, context_length = len(tables.slots_RP) - 1, tables.slots_RP.shape[1]
        device = tables.slots_RP.device
        self._spare_row = spare_row
        most = spare_row
        self._splits = splits(attention.shape, device)
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        # With shared prefixes the rows' lengths may add up to more than the pool has slots.
        num_pages = most * -(-context_length // attention.shape.page_size)
        self._pages = Pages.empty(most, num_pages, device)
        self.logits_BV = torch.empty((most, vocab_size), dtype=dtype, device=device)
        self.tokens_B = torch.empty(most, dtype=torch.int32, device=device)
        self._graphs: list[DecodeGraph] = []  # from small to large

    def capture(self, pool: Any) -> None:
        """On the stream that will launch them. Largest first, so that the others find their memory in its pool."""
        self._graphs = [self._capture(size, pool) for size in reversed(graph_sizes(self._spare_row))][::-1]

    def forward(self, plan: ScheduleBatch) -> DecodeGraph:
        """Launches a batch of decode rows; logits of its rows are then in `logits_BV`."""
        num_rows = plan.num_rows
        graph = next(graph for graph in self._graphs if graph.size >= num_rows)
        counts_B = plan.start + plan.length - plan.table_start
        if len(plan.slots) > num_rows or plan.opened:
            self._tables.apply(plan)
        inputs = np.zeros((3, graph.size), np.int64)
        inputs[0, num_rows:] = self._spare_row
        inputs[:, :num_rows] = plan.row, plan.start, plan.slots[np.cumsum(counts_B) - 1]
        packed = torch.from_numpy(inputs.reshape(-1)).pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
        if graph.planned_each_step:
            assert graph.kernel is not None
            page_size = self._attention.shape.page_size
            graph.kernel.plan(np.ones(graph.size, np.int32), inputs[1] + 1, page_size, causal=False, fixed_grid=True)
        graph.forward.replay()
        return graph

    def draw(self, graph: DecodeGraph) -> None:
        """Launches the choice of every row's token, for rows that want nothing but a temperature."""
        graph.draw.replay()

    def _capture(self, size: int, pool: Any) -> DecodeGraph:
        self._inputs.zero_()
        self._inputs[:size] = self._spare_row
        kernel, info, split = None, None, False
        if not decode_attention.wins(size, self._attention.shape.num_heads):
            # With fewer rows than the GPU has room for, a row's K/V is split as its length asks for; with more, never.
            split = size <= self._splits
            kernel = self._attention.decode if split else self._attention.kernel("fa2", FIXED_SCHEDULE)
            one = np.ones(size, np.int32)
            page_size = self._attention.shape.page_size
            info = kernel.plan(one, one, page_size, causal=False, fixed_grid=split, split=split)

        def forward() -> None:
            self._forward(size, kernel, info)

        def draw() -> None:
            rows_B, starts_B, _ = self._inputs[: 3 * size].view(3, size)
            ends_B = starts_B + 1
            self.tokens_B[:size] = self._sampler.draw(self.logits_BV[:size], rows_B, ends_B)
            sampling.write_tokens(self.tokens_B[:size], rows_B, ends_B, self._tables.tokens_RP)

        return DecodeGraph(size, kernel, split, captured(forward, pool), captured(draw, pool))

    def _forward(self, size: int, kernel: Kernel | None, info: Any) -> None:
        rows_B, starts_B, new_slots_B = self._inputs[: 3 * size].view(3, size)
        tables = self._tables
        tables.slots_RP[rows_B, starts_B] = new_slots_B.int()
        ids_B, positions_B, slots_B = torch.empty_like(self._inputs[: 3 * size]).view(3, size)
        lengths_B = starts_B + 1
        decode_inputs.gather(rows_B, lengths_B, tables.tokens_RP, tables.slots_RP, ids_B, positions_B, slots_B)
        if kernel is None:
            part = FewRowsPart(slice(None), rows_B, lengths_B, tables.slots_RP)
        else:
            pages = self._pages.of(size)
            decode_inputs.page_table(
                rows_B, lengths_B, tables.slots_RP, self._attention.shape.page_size, *pages.tensors
            )
            part = self._attention.decode_part(kernel, info, pages)
        attend = StepAttention(self._attention.cache, positions_B, slots_B, [part])
        self.logits_BV[:size] = self._model.logits(self._model.forward(ids_B, positions_B, attend))


def captured(work: Any, pool: Any) -> torch.cuda.CUDAGraph:
    """Runs it once before, since first runs load and compile."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool)
    try:
        work()
    finally:
        graph.capture_end()
    return graph
