"""L4, each rank: CUDA graphs of prompt and mixed steps, for models whose kernels are shorter than their launches.

Attention's schedule depends on the batch's rows, all the rest on the number of tokens alone. So there is a graph for
what lies between two attention calls, and a step launches them in turn; it takes the next larger number of tokens, and
those that are too many work on position 0 and the spare slot.

Shapes: N tokens of a graph, D hidden size, H query heads, S heads of queries, keys and values, C head_dim, P positions,
F = C / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from srt.executor.attention.flashinfer import FlashInferBackend
from srt.executor.cuda_graph import begin_capture
from srt.executor.forward_batch import ForwardBatch
from srt.kernels import rope
from srt.layers.attention import QKNorms
from srt.models.llama import LlamaForCausalLM

SIZES = (16, *range(32, 128, 32), *range(128, 1024, 64), *range(1024, 2048, 128), *range(2048, 4097, 256))
"""Close together, since a large model takes time in proportion. Beyond, kernels are long enough for any model."""


@dataclass
class PromptGraph:
    size: int
    pieces: list[torch.cuda.CUDAGraph]  # each ends where an attention call comes
    residual_ND: torch.Tensor


class PromptGraphs:
    def __init__(self, model: LlamaForCausalLM, attention: FlashInferBackend, most_tokens: int):
        self._model = model
        self.attention = attention
        shape, device = attention.shape, attention.device
        self._sizes = [size for size in SIZES if size <= most_tokens]
        most = max(self._sizes, default=0)
        self._inputs_3N = torch.zeros((3, most), dtype=torch.int64, device=device)  # ids, positions, slots
        queries = (most, shape.num_heads, shape.head_dim)
        self._q_NHC, self._o_NHC = (torch.zeros(queries, dtype=shape.dtype, device=device) for _ in range(2))
        self._graphs: list[PromptGraph] = []  # from small to large

    def run_first(self) -> None:
        """What is captured, with one layer and not for its results."""
        for size in self._sizes:
            ids_N, positions_N, slots_N = self._inputs_3N[:, :size]
            attend = BetweenPieces(self, positions_N, slots_N, size, None)
            self._model.first_layer().forward(ids_N, positions_N, attend)

    def capture(self, pool: Any) -> None:
        """On the stream that will launch them, behind `run_first`."""
        self._graphs = [self._capture(size, pool) for size in reversed(self._sizes)][::-1]

    def holds(self, num_tokens: int) -> bool:
        return len(self._graphs) > 0 and num_tokens <= self._graphs[-1].size

    def attend(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As the model's. The next launch overwrites what it gives, in the stream's order."""
        num_tokens = len(batch.ids_N)
        graph = next(graph for graph in self._graphs if graph.size >= num_tokens)
        attention = self.attention.plan(batch)
        self._inputs_3N[:, num_tokens : graph.size] = 0
        for line, values in zip(self._inputs_3N, (batch.ids_N, batch.positions_N, batch.slots_N), strict=True):
            line[:num_tokens] = values
        o_NHC = self._o_NHC[:num_tokens]
        for layer, piece in enumerate(graph.pieces):
            piece.replay()
            attention.attend(layer, self._q_NHC[:num_tokens], o_NHC)
        return o_NHC.view(num_tokens, -1), graph.residual_ND[:num_tokens]

    def _capture(self, size: int, pool: Any) -> PromptGraph:
        ids_N, positions_N, slots_N = self._inputs_3N[:, :size]
        pieces = Pieces(pool)
        pieces.begin()
        attend = BetweenPieces(self, positions_N, slots_N, size, pieces)
        return PromptGraph(size, pieces.graphs, self._model.attend(ids_N, positions_N, attend)[1])

    def rotate(self, layer: int, size: int, *inputs: Any) -> torch.Tensor:
        """Queries to where attention will find them, keys and values into the cache; where attention puts its own."""
        qkv_NSC, turns_P2F, positions_N, slots_N, norms = inputs
        rope.rotate_and_store(
            qkv_NSC,
            turns_P2F,
            positions_N,
            slots_N,
            self.attention.cache[layer],
            *(norms or (None, None, 0.0)),
            q_NHC=self._q_NHC[:size],
        )
        return self._o_NHC[:size]


class Pieces:
    """Graphs captured one behind the other."""

    def __init__(self, pool: Any):
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = pool

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        begin_capture(self.graphs[-1], self._pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()


@dataclass(frozen=True)
class BetweenPieces:
    """The `FusedAttend` of a capture: what comes before attention ends one graph, what comes after begins the next."""

    owner: PromptGraphs
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    size: int
    pieces: Pieces | None

    def __call__(
        self, layer: int, qkv_NSC: torch.Tensor, turns_P2F: torch.Tensor, norms: QKNorms | None
    ) -> torch.Tensor:
        o_NHC = self.owner.rotate(layer, self.size, qkv_NSC, turns_P2F, self.positions_N, self.slots_N, norms)
        if self.pieces is not None:
            self.pieces.end()
            if layer + 1 < len(self.owner.attention.cache):
                self.pieces.begin()
        return o_NHC
