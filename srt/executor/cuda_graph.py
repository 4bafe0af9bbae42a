"""L4, each rank: CUDA graphs of decode steps, for each batch size one of the forward and one of the draw of its tokens.

A graph begins with gathering its tokens, positions and slots from the row tables and ends with the new tokens in them,
so a step costs the host one small upload and two launches. A batch takes the next larger size; the rows that are too
many work on a spare row of the tables and the spare page. Some sizes have a second forward, for rows that share
prefixes.

Shapes: B rows of a graph, N tokens of a step, W this rank's part of the vocabulary, M items of work; R rows and P
positions of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from srt.executor.attention.flashinfer import CascadePart, DecodePart, FlashInferBackend, Part, StepAttention
from srt.executor.cuda_sampler import CudaSampler
from srt.executor.tables import RowTables
from srt.kernels import decode_inputs, sampling
from srt.kernels.decode_attention import BlockTable, Tiling
from srt.kernels.edits import Masks
from srt.models.llama import LlamaForCausalLM
from srt.scheduler.schedule_batch import ScheduleBatch


def graph_sizes(most_rows: int) -> list[int]:
    """Close together where a step is bound by the launches and weights that small batches share, then by 16."""
    ladder = [1, 2, 3, 4, *range(6, 33, 2), *range(40, 65, 8), *range(80, most_rows + 16, 16)]
    return [size for size in ladder if size < most_rows] + [most_rows]


def has_cascade(size: int, most_rows: int) -> bool:
    """Not all: where it is worth it to read a prefix once, a few padding rows cost little."""
    return size in (4, 8, most_rows) or size % (16 if size <= 64 else 32) == 0


@dataclass
class DecodeGraph:
    size: int
    forward: torch.cuda.CUDAGraph
    cascade: torch.cuda.CUDAGraph | None  # the forward of rows that share prefixes
    draw: torch.cuda.CUDAGraph


class DecodeGraphs:
    """`logits_BW` and `tokens_B` hold what was launched last; a later launch overwrites them, in the stream's order."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        attention: FlashInferBackend,
        sampler: CudaSampler,
        tables: RowTables,
    ):
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._tables = tables
        spare_row, context_length = len(tables.slots_RP) - 1, tables.slots_RP.shape[1]
        device = tables.slots_RP.device
        self._spare_row = spare_row
        most = spare_row
        # Rows, starts and slots; then what rows share, and the items of that work.
        self._inputs = torch.zeros(6 * most + 4 * attention.most_items(most), dtype=torch.int64, device=device)
        self._gathered = torch.zeros(3 * most, dtype=torch.int64, device=device)  # ids, positions and slots
        # With shared prefixes the rows' lengths may add up to more than the pool has slots.
        self._table = BlockTable(most, most * context_length, device)
        self.logits_BW = torch.empty((most, model.head.width), dtype=torch.float32, device=device)
        self.tokens_B = torch.empty(most, dtype=torch.int32, device=device)
        self._graphs: list[DecodeGraph] = []  # from small to large

    def capture(self, pool: Any) -> None:
        """On the stream that will launch them, behind `run_first`.

        Largest first, so that the others find their memory in its pool.
        """
        self._graphs = [self._capture(size, pool) for size in reversed(graph_sizes(self._spare_row))][::-1]

    def hold(self, plan: ScheduleBatch) -> bool:
        return 0 < plan.num_rows == plan.num_decode + plan.num_drafted and plan.num_tokens <= self._spare_row

    def forward(self, plan: ScheduleBatch) -> DecodeGraph:
        """Launches a batch of decode rows; logits of its tokens are then in `logits_BW`.

        To a graph, each token of a draft is a row: it sees what is stored of its row up to its own position.
        """
        num_tokens, work = plan.num_tokens, None if plan.num_drafted else self._attention.work(plan)
        graph = next(g for g in self._graphs if g.size >= num_tokens and (work is None or g.cascade is not None))
        if len(plan.slots) > num_tokens or plan.opened or plan.num_drafted:
            self._tables.apply(plan)
        inputs = np.zeros((6, graph.size), np.int64)
        inputs[0, num_tokens:] = self._spare_row
        inputs[:3, :num_tokens] = tokens_of(plan)
        if work is None:
            self._upload(inputs[:3])
            graph.forward.replay()
        else:
            assert graph.cascade is not None
            inputs[3:, :num_tokens] = work.rows_3B
            items = np.zeros((4, self._attention.most_items(graph.size)), np.int64)
            items[:, : work.items_4M.shape[1]] = work.items_4M
            self._upload(inputs, items)
            graph.cascade.replay()
        return graph

    def _upload(self, *inputs: np.ndarray) -> None:
        packed = torch.from_numpy(np.concatenate([each.reshape(-1) for each in inputs])).pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)

    def draw(self, graph: DecodeGraph, masks: Masks | None) -> None:
        """Launches the choice of every row's token, for rows that want nothing but a temperature and perhaps a mask.

        The host has time for these few launches: the forward before them still runs.
        """
        if masks is None:
            graph.draw.replay()
        else:
            self._draw(graph.size, masks)

    def run_first(self) -> None:
        """What is captured, with one layer and not for its results."""
        for size in graph_sizes(self._spare_row):
            for work in self._work(size, self._model.first_layer()):
                work()

    def _capture(self, size: int, pool: Any) -> DecodeGraph:
        forward, draw, *cascade = (captured(work, pool) for work in self._work(size, self._model))
        return DecodeGraph(size, forward, cascade[0] if cascade else None, draw)

    def _work(self, size: int, model: LlamaForCausalLM) -> list[Callable[[], None]]:
        """The forward, the draw, and maybe the forward of rows that share prefixes."""

        def forward() -> None:
            self._forward(size, model, shares=False)

        def cascade() -> None:
            self._forward(size, model, shares=True)

        def draw() -> None:
            self._draw(size, None)

        return [forward, draw, *([cascade] if has_cascade(size, self._spare_row) else [])]

    def _forward(self, size: int, model: LlamaForCausalLM, *, shares: bool) -> None:
        rows_B, starts_B, new_slots_B = self._inputs[: 3 * size].view(3, size)
        tables, tiling = self._tables, Tiling.of(size, self._attention.shape.group)
        tables.slots_RP[rows_B, starts_B] = new_slots_B.int()
        ids_B, positions_B, slots_B = self._gathered[: 3 * size].view(3, size)
        lengths_B = starts_B + 1
        decode_inputs.gather(rows_B, lengths_B, tables.tokens_RP, tables.slots_RP, ids_B, positions_B, slots_B)
        if shares:
            rows_3B = self._inputs[3 * size : 6 * size].view(3, size)
            items_4M = self._inputs[6 * size :][: 4 * self._attention.most_items(size)].view(4, -1)
            blocks = self._table.fill(rows_B, lengths_B, tables.slots_RP, tiling, rows_3B[0])
            part: Part = CascadePart(slice(None), blocks, rows_B, tables.slots_RP, items_4M, rows_3B)
        else:
            part = DecodePart(slice(None), self._table.fill(rows_B, lengths_B, tables.slots_RP, tiling))
        attend = StepAttention(self._attention.cache, positions_B, slots_B, [part])
        model.head.of_own(model.forward(ids_B, positions_B, attend), self.logits_BW[:size])

    def _draw(self, size: int, masks: Masks | None) -> None:
        rows_B, starts_B, _ = self._inputs[: 3 * size].view(3, size)
        ends_B = starts_B + 1
        self.tokens_B[:size] = self._sampler.draw(self.logits_BW[:size], rows_B, ends_B, masks)
        sampling.write_tokens(self.tokens_B[:size], rows_B, ends_B, self._tables.tokens_RP)


def tokens_of(plan: ScheduleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Table row, position and slot of each token of a step."""
    counts_B = plan.start + plan.length - plan.table_start
    if not plan.num_drafted:
        return plan.row, plan.start, plan.slots[counts_B.cumsum() - 1]
    token_N, before_B = np.arange(plan.num_tokens), plan.length.cumsum() - plan.length
    slot_N = token_N + (counts_B.cumsum() - plan.length - before_B).repeat(plan.length)
    return plan.row.repeat(plan.length), token_N + (plan.start - before_B).repeat(plan.length), plan.slots[slot_N]


def begin_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """What other threads ask the device meanwhile, such as NCCL's, does not disturb it."""
    graph.capture_begin(pool, capture_error_mode="thread_local")


def captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Of what was run before, since first runs load and compile."""
    graph = torch.cuda.CUDAGraph()
    begin_capture(graph, pool)
    try:
        work()
    finally:
        graph.capture_end()
    return graph
