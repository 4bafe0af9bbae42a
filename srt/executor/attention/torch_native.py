"""L4, each rank: attention in plain torch operations, for CPUs and as the reference of the other backends.

Shapes: N tokens, H query heads, G key/value heads, Q = H / G query heads that share one, S = 2 G keys and values,
C head_dim, T slots; R decode rows of a group, L positions of its longest row, X = R G; M tokens of a prompt chunk, P
positions of its row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.layers.attention import Attend

WASTE = 1024
"""Padded positions that cost about as much as the operations of one more group of decode rows."""


class TorchNativeBackend:
    def __init__(self, cache: KVCache, num_kv_heads: int, num_heads: int):
        self._cache = cache
        self._num_kv_heads = num_kv_heads
        self._num_heads = num_heads

    def plan(self, batch: ForwardBatch) -> Attend:
        plan, num_decode = batch.plan, batch.num_decode
        groups = [
            DecodeGroup.build(batch, rows, self._num_kv_heads, self._num_heads)
            for rows in groups_of_similar_length(plan.start[:num_decode] + 1)
        ]
        ends = np.cumsum(plan.length)
        chunks = [Chunk.build(batch, index, int(ends[index])) for index in range(num_decode, plan.num_rows)]
        return StepAttention(self._cache, batch, groups, chunks)


class StepAttention:
    """One step's `Attend`."""

    def __init__(self, cache: KVCache, batch: ForwardBatch, groups: list[DecodeGroup], chunks: list[Chunk]):
        self._cache = cache
        self._slots_N = batch.slots_N
        self._groups = groups
        self._chunks = chunks

    def __call__(self, layer: int, q_NHC: torch.Tensor, kv_NSC: torch.Tensor) -> torch.Tensor:
        self._cache.store(layer, self._slots_N, kv_NSC)
        cached_TSC = self._cache.layer(layer)
        if len(self._groups) + len(self._chunks) == 1:
            return (*self._groups, *self._chunks)[0].attend(q_NHC, cached_TSC)
        o_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
        for part in (*self._groups, *self._chunks):
            o_NHC[part.tokens] = part.attend(q_NHC[part.tokens], cached_TSC)
        return o_NHC


def groups_of_similar_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Rows, as indices, whose lengths may be padded to the longest of their group for little waste."""
    if len(lengths) == 0:
        return []
    longest_first = np.argsort(-lengths, kind="stable")
    groups, begin, waste = [], 0, 0
    for place, length in enumerate(lengths[longest_first].tolist()):
        waste += int(lengths[longest_first[begin]]) - length
        if waste > WASTE:
            groups.append(longest_first[begin:place])
            begin, waste = place, 0
    groups.append(longest_first[begin:])
    return groups if len(groups) > 1 else [np.arange(len(lengths))]


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each. Keys are gathered and multiplied; values are summed where they lie, by embedding bags."""

    tokens: torch.Tensor
    slots_RL: torch.Tensor
    bias_R1L: torch.Tensor | None  # -inf behind a row's end; None where all rows are equally long
    value_rows: torch.Tensor  # [R G Q L], rows of the pool seen as [T 2 G, C]
    bags: torch.Tensor  # [R G Q], where in `value_rows` each query's begin

    @classmethod
    def build(cls, batch: ForwardBatch, rows: np.ndarray, num_kv_heads: int, num_heads: int) -> DecodeGroup:
        lengths = batch.plan.start[rows] + 1
        longest = int(lengths.max())
        tokens = torch.from_numpy(rows.astype(np.int64))
        # Behind a row's end the table holds slots of earlier tenants: harmless to read, and masked.
        slots_RL = batch.tables.slots_RP[torch.from_numpy(batch.plan.row[rows].astype(np.int64)), :longest]
        bias_R1L = None
        if int(lengths.min()) < longest:
            beyond_RL = torch.arange(longest) >= torch.from_numpy(lengths)[:, None]
            bias_R1L = torch.zeros(beyond_RL.shape).masked_fill_(beyond_RL, -math.inf)[:, None, :]
        value_heads = num_kv_heads + torch.arange(num_heads) // (num_heads // num_kv_heads)
        value_rows = slots_RL[:, None, :] * (2 * num_kv_heads) + value_heads[:, None]
        bags = torch.arange(len(rows) * num_heads) * longest
        return cls(tokens, slots_RL, bias_R1L, value_rows.view(-1), bags)

    def attend(self, q_RHC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, head_dim = q_RHC.shape
        longest, num_kv_heads = self.slots_RL.shape[1], cached_TSC.shape[1] // 2
        k_RLGC = cached_TSC[:, :num_kv_heads].index_select(0, self.slots_RL.view(-1))
        k_RLGC = k_RLGC.view(num_rows, longest, num_kv_heads, head_dim)
        k_RGLC = torch.empty((num_rows, num_kv_heads, longest, head_dim), dtype=q_RHC.dtype)
        k_RGLC.copy_(k_RLGC.transpose(1, 2))
        # The query heads that share a key head stand together, so that keys are never repeated.
        q_XQC = (q_RHC * head_dim**-0.5).view(num_rows * num_kv_heads, -1, head_dim)
        weight_XQL = torch.bmm(q_XQC, k_RGLC.view(-1, longest, head_dim).transpose(1, 2))
        if self.bias_R1L is not None:
            weight_XQL.view(num_rows, num_heads, longest).add_(self.bias_R1L)
        weights = weight_XQL.softmax(-1).to(cached_TSC.dtype).view(-1)
        o_XC = torch.embedding_bag(cached_TSC.view(-1, head_dim), self.value_rows, self.bags, False, 0, False, weights)[
            0
        ]
        return o_XC.to(q_RHC.dtype).view(num_rows, num_heads, head_dim)


@dataclass(frozen=True)
class Chunk:
    """The last M of a row's P positions."""

    tokens: slice
    slots_P: torch.Tensor
    mask_MP: torch.Tensor | None  # None: the chunk is the whole row, plainly causal

    @classmethod
    def build(cls, batch: ForwardBatch, index: int, end: int) -> Chunk:
        row, start, length = (int(values[index]) for values in (batch.plan.row, batch.plan.start, batch.plan.length))
        mask_MP = None if start == 0 else torch.ones((length, start + length), dtype=torch.bool).tril_(start)
        return cls(slice(end - length, end), batch.tables.slots_RP[row, : start + length], mask_MP)

    def attend(self, q_MHC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        kv_PSC = cached_TSC.index_select(0, self.slots_P).to(q_MHC.dtype)
        k_GPC, v_GPC = kv_PSC.transpose(0, 1).chunk(2)
        o_HMC = F.scaled_dot_product_attention(
            q_MHC.transpose(0, 1)[None],
            k_GPC[None],
            v_GPC[None],
            attn_mask=self.mask_MP,
            is_causal=self.mask_MP is None,
            enable_gqa=True,
        )[0]
        return o_HMC.transpose(0, 1)
