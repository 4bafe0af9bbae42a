"""L4, each rank: token embedding and language-model head, both split over ranks by vocabulary.

Shapes: N tokens, D hidden size, V vocabulary, W rows of it of this rank, R ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from srt.layers.context import LayerContext, WeightSlot, WeightSlots
from srt.layers.linear import Linear


class VocabShard:
    """Rows [start, start + rows) of the vocabulary, of which the first `filled` exist; the last shard may be padded."""

    def __init__(self, context: LayerContext, vocab_size: int):
        size = context.parallel.size
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // size)
        self.start = min(context.parallel.rank * self.rows, vocab_size)
        self.filled = min(self.rows, vocab_size - self.start)

    def slot(self, weight_WD: torch.Tensor) -> WeightSlot:
        weight_WD[self.filled :].zero_()
        return WeightSlot(weight_WD[: self.filled], (self.vocab_size, weight_WD.shape[1]), start=self.start)


class VocabParallelEmbedding:
    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int):
        self._parallel = context.parallel
        self._on_gpu = context.on_gpu
        self._dtype = context.activation_dtype
        self._shard = VocabShard(context, vocab_size)
        self.weight_WD = context.empty(self._shard.rows, hidden_size)

    def weight_slots(self) -> WeightSlots:
        yield "weight", self._shard.slot(self.weight_WD)

    def __call__(self, ids_N: torch.Tensor) -> torch.Tensor:
        """On GPUs this rank's part, which the first norm adds up."""
        if self._parallel.size == 1:
            return F.embedding(ids_N, self.weight_WD).to(self._dtype)
        local_N = ids_N - self._shard.start
        mine_N = (local_N >= 0) & (local_N < self._shard.filled)
        x_ND = F.embedding(local_N * mine_N, self.weight_WD).to(self._dtype) * mine_N.unsqueeze(-1)
        return x_ND if self._on_gpu else self._parallel.all_reduce(x_ND)


class ParallelLMHead(Linear):
    """Hidden states to float32 logits [N, vocab_size]. Give it the embedding to share its weight.

    Two tokens whose logits differ by less than 0.06 would often be the same in bfloat16.
    """

    def __init__(
        self, context: LayerContext, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None
    ):
        self._parallel = context.parallel
        self._shard = VocabShard(context, vocab_size)
        self._tied = tied_to is not None
        super().__init__(context, hidden_size, self._shard.rows, bias=False, weight_OI=tied_to and tied_to.weight_WD)

    def weight_slots(self) -> WeightSlots:
        if not self._tied:
            yield "weight", self._shard.slot(self.weight_OI)

    @property
    def own_tokens(self) -> range:
        """Which of the vocabulary are this rank's; the logits of a shard may have more columns, of no tokens."""
        return range(self._shard.start, self._shard.start + self._shard.filled)

    @property
    def width(self) -> int:
        return self._shard.rows

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.of_all(self.of_own(x_ND))

    def of_all(self, logits_NW: torch.Tensor) -> torch.Tensor:
        """The whole vocabulary's, of what `of_own` gave on each rank -> [N, V]."""
        if self._parallel.size == 1:
            return logits_NW
        shards_RNW = self._parallel.all_gather(logits_NW)
        return torch.cat(tuple(shards_RNW), dim=1)[:, : self._shard.vocab_size]

    def of_own(self, x_ND: torch.Tensor, out_NW: torch.Tensor | None = None) -> torch.Tensor:
        """Of this rank's tokens -> [N, W], in `out_NW` if it is given."""
        if not self._context.on_gpu:
            return self._multiply(x_ND)
        if out_NW is None:
            out_NW = x_ND.new_empty((len(x_ND), self._shard.rows), dtype=torch.float32)
        if self._streams(len(x_ND)):
            return self._kernels.small_batch_linear(x_ND, self.weight_OI, out_NO=out_NW)
        return torch.mm(x_ND, self.weight_OI.T, out_dtype=torch.float32, out=out_NW)
