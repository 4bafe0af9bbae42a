"""L4, each rank: attention on a CPU, by the compiled kernels where there are any, else in plain torch operations.

Shapes: N tokens, H query heads, G key/value heads, S = 2 G keys and values, C head_dim, T slots, X rows of the slot
table; R rows, L positions of the longest one of a group; M tokens of a prompt chunk, P positions of its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.kernels import cpu
from srt.layers.attention import Attend

WASTE = 1024
"""Padded positions that cost about as much as the operations of one more group of decode rows."""


class TorchNativeBackend:
    def __init__(self, cache: KVCache):
        self._cache = cache

    def plan(self, batch: ForwardBatch) -> Attend:
        plan, num_decode = batch.plan, batch.num_decode
        if cpu.serves(batch.slots_N.device, self._cache.head_dim):
            num_decode += plan.num_drafted
            parts: list[Part] = [DecodeRows.build(batch, num_decode)] if num_decode else []
            if num_decode < plan.num_rows:
                parts.append(Chunks.build(batch, num_decode))
            return StepAttention(self._cache, batch, parts)
        similar = groups_of_similar_length(plan.start[:num_decode] + 1)
        groups = [DecodeGroup.build(batch, rows) for rows in similar]
        ends = np.cumsum(plan.length)
        chunks = [Chunk.build(batch, index, int(ends[index])) for index in range(num_decode, plan.num_rows)]
        return StepAttention(self._cache, batch, [*groups, *chunks])


class Part(Protocol):
    """Some of a step's tokens."""

    tokens: slice | torch.Tensor

    def attend(self, q_NHC: torch.Tensor, kv_NSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor: ...


class StepAttention:
    """One step's `Attend`."""

    def __init__(self, cache: KVCache, batch: ForwardBatch, parts: list[Part]):
        self._cache = cache
        self._slots_N = batch.slots_N
        self._parts = parts

    def __call__(self, layer: int, q_NHC: torch.Tensor, kv_NSC: torch.Tensor) -> torch.Tensor:
        self._cache.store(layer, self._slots_N, kv_NSC)
        cached_TSC = self._cache.layer(layer)
        if len(self._parts) == 1:
            return self._parts[0].attend(q_NHC, kv_NSC, cached_TSC)
        o_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
        for part in self._parts:
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
class DecodeRows:
    """Rows of one token each, computed by the compiled kernel, which reads the pool where it lies.

    To it, the tokens of a draft are rows too: they see what is stored of the row up to their own positions.
    """

    tokens: slice
    slots_XP: torch.Tensor
    rows_R: torch.Tensor
    lengths_R: torch.Tensor

    @classmethod
    def build(cls, batch: ForwardBatch, num_rows: int) -> DecodeRows:
        """Of the plan's first rows."""
        sizes = batch.plan.length[:num_rows]
        tokens = slice(0, int(sizes.sum()))
        rows = torch.from_numpy(batch.plan.row[:num_rows].astype(np.int64).repeat(sizes))
        return cls(tokens, batch.tables.slots_RP, rows, batch.positions_N[tokens] + 1)

    def attend(self, q_RHC: torch.Tensor, kv_RSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        return cpu.decode(q_RHC, cached_TSC, self.slots_XP, self.rows_R, self.lengths_R)


@dataclass(frozen=True)
class Chunks:
    """All prompt chunks of a step, likewise. They see their own keys and values as they are stored, so what a prompt
    gives does not depend on where it was cut."""

    tokens: slice
    slots_XP: torch.Tensor
    rows_R: torch.Tensor
    lengths_R: torch.Tensor
    counts_R: torch.Tensor

    @classmethod
    def build(cls, batch: ForwardBatch, first: int) -> Chunks:
        """Of the plan's rows from `first` on."""
        plan = batch.plan
        rows, counts = (torch.from_numpy(values[first:].astype(np.int64)) for values in (plan.row, plan.length))
        lengths = torch.from_numpy((plan.start + plan.length)[first:].astype(np.int64))
        tokens = slice(int(plan.length[:first].sum()), plan.num_tokens)
        return cls(tokens, batch.tables.slots_RP, rows, lengths, counts)

    def attend(self, q_NHC: torch.Tensor, kv_NSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        return cpu.prefill(q_NHC, cached_TSC, self.slots_XP, self.rows_R, self.lengths_R, self.counts_R)


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each whose lengths are similar, for where there is no compiled kernel."""

    tokens: torch.Tensor
    slots_RL: torch.Tensor  # each row padded to L
    mask_R11L: torch.Tensor  # False behind a row's end

    @classmethod
    def build(cls, batch: ForwardBatch, rows: np.ndarray) -> DecodeGroup:
        lengths_R = torch.from_numpy(batch.plan.start[rows].astype(np.int64) + 1)
        table_rows = torch.from_numpy(batch.plan.row[rows].astype(np.int64))
        slots_RL = batch.tables.slots_RP[table_rows, : int(lengths_R.max())]
        mask_RL = torch.arange(slots_RL.shape[1]) < lengths_R[:, None]
        # Behind a row's end the table may hold anything; slot 0 is finite, and so is nothing times it.
        slots_RL = slots_RL.masked_fill(~mask_RL, 0)
        return cls(torch.from_numpy(rows.astype(np.int64)), slots_RL, mask_RL[:, None, None, :])

    def attend(self, q_RHC: torch.Tensor, kv_RSC: torch.Tensor, cached_TSC: torch.Tensor) -> torch.Tensor:
        k_RGLC, v_RGLC = cached_TSC[self.slots_RL].to(q_RHC.dtype).transpose(1, 2).chunk(2, dim=1)
        o_RH1C = F.scaled_dot_product_attention(
            q_RHC[:, :, None], k_RGLC, v_RGLC, attn_mask=self.mask_R11L, enable_gqa=True
        )
        return o_RH1C[:, :, 0]


@dataclass(frozen=True)
class Chunk:
    """The last M of a row's P positions, for where there is no compiled kernel."""

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
