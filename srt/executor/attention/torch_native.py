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

LEAST_SHARED = 64
"""Shorter common prefixes are cheaper read once per row than treated apart."""


class TorchNativeBackend:
    def __init__(self, cache: KVCache, num_heads: int):
        self._cache = cache
        self._num_heads = num_heads

    def plan(self, batch: ForwardBatch) -> Attend:
        plan, num_decode = batch.plan, batch.num_decode
        groups = [
            DecodeGroup.build(batch, rows, self._num_heads, self._cache.layer(0))
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
        parts = (*self._groups, *self._chunks)
        if len(parts) == 1:
            return parts[0].attend(q_NHC, kv_NSC, cached_TSC)
        o_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
        for part in parts:
            o_NHC[part.tokens] = part.attend(q_NHC[part.tokens], kv_NSC[part.tokens], cached_TSC)
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
    """Rows of one token each, whose first positions may be the same slots for all.

    Behind these, keys are gathered and multiplied, and values are summed where they lie, by embedding bags.
    """

    tokens: torch.Tensor
    shared_P: torch.Tensor | None  # slots of the first positions if all rows have the same
    slots_N: torch.Tensor  # the others' slots, row after row, each row padded to L
    bias_X1L: torch.Tensor | None  # -inf behind a row's end; None where all rows are equally long
    value_rows: torch.Tensor  # [R H L], rows of the pool seen as [T S, C]
    bags: torch.Tensor  # [R H], where in `value_rows` each query's begin
    # Every layer gathers its keys here: fresh memory costs as much as the copy.
    gathered_NGC: torch.Tensor
    gathered_RGLC: torch.Tensor  # the same, seen head by head
    k_RGLC: torch.Tensor
    k_XCL: torch.Tensor  # the same, seen transposed

    @classmethod
    def build(cls, batch: ForwardBatch, rows: np.ndarray, num_heads: int, cached_TSC: torch.Tensor) -> DecodeGroup:
        num_kv_heads, head_dim = cached_TSC.shape[1] // 2, cached_TSC.shape[2]
        lengths_R = torch.from_numpy(batch.plan.start[rows].astype(np.int64) + 1)
        table_rows = torch.from_numpy(batch.plan.row[rows].astype(np.int64))
        slots_RL = batch.tables.slots_RP[table_rows, : int(lengths_R.max())]
        shared_P = None
        num_shared = common_positions(slots_RL, int(lengths_R.min()) - 1)
        if num_shared >= LEAST_SHARED:
            shared_P, slots_RL = slots_RL[0, :num_shared], slots_RL[:, num_shared:].contiguous()
            lengths_R = lengths_R - num_shared
        longest = slots_RL.shape[1]
        bias_X1L = None
        if int(lengths_R.min()) < longest:
            beyond_RL = torch.arange(longest) >= lengths_R[:, None]
            # Behind a row's end the table may hold anything; slot 0 is finite, and so is nothing times it.
            slots_RL = slots_RL.masked_fill(beyond_RL, 0)
            bias_RL = torch.zeros(beyond_RL.shape).masked_fill_(beyond_RL, -math.inf)
            bias_X1L = bias_RL.repeat_interleave(num_kv_heads, dim=0)[:, None, :]
        value_heads = num_kv_heads + torch.arange(num_heads, dtype=torch.int32) // (num_heads // num_kv_heads)
        value_rows = slots_RL[:, None, :] * (2 * num_kv_heads) + value_heads[:, None]
        bags = torch.arange(len(rows) * num_heads, dtype=torch.int32) * longest
        tokens = torch.from_numpy(rows.astype(np.int64))
        gathered_NGC = torch.empty((len(rows) * longest, num_kv_heads, head_dim), dtype=cached_TSC.dtype)
        k_RGLC = torch.empty((len(rows), num_kv_heads, longest, head_dim))
        return cls(
            tokens=tokens,
            shared_P=shared_P,
            slots_N=slots_RL.view(-1),
            bias_X1L=bias_X1L,
            value_rows=value_rows.view(-1),
            bags=bags,
            gathered_NGC=gathered_NGC,
            gathered_RGLC=gathered_NGC.view(len(rows), longest, num_kv_heads, head_dim).transpose(1, 2),
            k_RGLC=k_RGLC,
            k_XCL=k_RGLC.view(-1, longest, head_dim).transpose(1, 2),
        )

    def attend(self, q_RHC: torch.Tensor, kv_RSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, head_dim = q_RHC.shape
        score_RHL = self._scores(q_RHC, cached_TSC)
        if self.shared_P is None:
            return self._values(score_RHL.softmax(-1), cached_TSC, q_RHC.dtype)
        kv_SPC = cached_TSC.index_select(0, self.shared_P).transpose(0, 1).to(q_RHC.dtype).contiguous()
        k_GPC, v_GPC = kv_SPC.chunk(2)
        num_shared, num_kv_heads = k_GPC.shape[1], k_GPC.shape[0]
        # All rows' queries of a head make one matrix, so the shared keys and values are read once.
        q_GXC = q_RHC.reshape(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        score_GXP = torch.bmm(q_GXC, k_GPC.transpose(1, 2)).mul_(head_dim**-0.5)
        score_GRQP = score_GXP.view(num_kv_heads, num_rows, -1, num_shared)
        shared_RHP = score_GRQP.transpose(0, 1).reshape(num_rows, num_heads, num_shared)
        weight_RHL = torch.cat((shared_RHP, score_RHL), dim=-1).softmax(-1)
        weight_RGQP = weight_RHL[..., :num_shared].view(num_rows, num_kv_heads, -1, num_shared)
        o_GXC = torch.bmm(weight_RGQP.transpose(0, 1).reshape(num_kv_heads, -1, num_shared), v_GPC)
        o_RGQC = o_GXC.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1)
        o_RHC = self._values(weight_RHL[..., num_shared:], cached_TSC, q_RHC.dtype)
        return o_RHC.add_(o_RGQC.reshape(num_rows, num_heads, head_dim))

    def _scores(self, q_RHC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, head_dim = q_RHC.shape
        torch.index_select(cached_TSC[:, : self.k_RGLC.shape[1]], 0, self.slots_N, out=self.gathered_NGC)
        self.k_RGLC.copy_(self.gathered_RGLC)
        # The query heads that share a key head stand together, so that keys are never repeated.
        q_XQC = q_RHC.reshape(len(self.k_XCL), -1, head_dim)
        if self.bias_X1L is None:
            score_XQL = torch.bmm(q_XQC, self.k_XCL).mul_(head_dim**-0.5)
        else:
            score_XQL = torch.baddbmm(self.bias_X1L, q_XQC, self.k_XCL, alpha=head_dim**-0.5)
        return score_XQL.view(num_rows, num_heads, -1)

    def _values(self, weight_RHL: torch.Tensor, cached_TSC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_rows, num_heads, _ = weight_RHL.shape
        values = cached_TSC.view(-1, cached_TSC.shape[-1])
        weights = weight_RHL.to(values.dtype).reshape(-1)
        o_XC = torch.embedding_bag(values, self.value_rows, self.bags, False, 0, False, weights)[0]
        return o_XC.view(num_rows, num_heads, -1).to(dtype)


def common_positions(slots_RL: torch.Tensor, most: int) -> int:
    """How many of the first `most` positions have one slot for all of several rows."""
    if len(slots_RL) == 1:
        return 0
    same_L = (slots_RL[:, :most] == slots_RL[0, :most]).all(0)
    return int(same_L.to(torch.int8).cumprod(0).sum())


@dataclass(frozen=True)
class Chunk:
    """The last M of a row's P positions."""

    tokens: slice
    slots_P: torch.Tensor | None  # None: the chunk is the whole row so far, and the cache has nothing to add
    mask_MP: torch.Tensor | None

    @classmethod
    def build(cls, batch: ForwardBatch, index: int, end: int) -> Chunk:
        row, start, length = (int(values[index]) for values in (batch.plan.row, batch.plan.start, batch.plan.length))
        tokens = slice(end - length, end)
        if start == 0:
            return cls(tokens, None, None)
        mask_MP = torch.ones((length, start + length), dtype=torch.bool).tril_(start)
        return cls(tokens, batch.tables.slots_RP[row, : start + length], mask_MP)

    def attend(self, q_MHC: torch.Tensor, kv_MSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        kv_PSC = kv_MSC
        if self.slots_P is not None:
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
