"""L4, each rank: attention in plain torch operations, for CPUs and as the reference of the other backends.

Shapes: N tokens, R decode rows, L padded positions, P positions of one chunk's row, M tokens of one chunk,
H query heads, G key/value heads, Q = H / G query heads that share one, C head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from srt.executor.forward_batch import ForwardBatch
from srt.executor.kv_cache import KVCache
from srt.layers.attention import Attend


@dataclass(frozen=True)
class DecodeRows:
    slots_RL: torch.Tensor
    mask_R11L: torch.Tensor  # bool, True where the position exists


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, first + length) of the step, the last `length` of their row's positions."""

    first: int
    length: int
    slots_P: torch.Tensor
    mask_MP: torch.Tensor | None  # None: the chunk is the whole row, plainly causal


class TorchNativeBackend:
    def __init__(self, cache: KVCache):
        self._cache = cache

    def plan(self, batch: ForwardBatch) -> Attend:
        num_decode = batch.num_decode
        decode = decode_rows(batch) if num_decode else None
        chunks, first = [], num_decode
        for index in range(num_decode, batch.plan.num_rows):
            chunk = chunk_of(batch, index, first)
            chunks.append(chunk)
            first += chunk.length
        return StepAttention(self._cache, batch.slots_N, num_decode, decode, chunks)


class StepAttention:
    """One step's `Attend`."""

    def __init__(
        self, cache: KVCache, slots_N: torch.Tensor, num_decode: int, decode: DecodeRows | None, chunks: list[Chunk]
    ):
        self._cache = cache
        self._slots_N = slots_N
        self._num_decode = num_decode
        self._decode = decode
        self._chunks = chunks

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor) -> torch.Tensor:
        self._cache.store(layer, self._slots_N, k_NGC, v_NGC)
        k_TGC, v_TGC = self._cache.layer(layer)
        parts = []
        if self._decode is not None:
            parts.append(attend_decode(q_NHC[: self._num_decode], k_TGC, v_TGC, self._decode))
        for chunk in self._chunks:
            q_MHC = q_NHC[chunk.first : chunk.first + chunk.length]
            parts.append(attend_chunk(q_MHC, k_TGC, v_TGC, chunk))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode_rows(batch: ForwardBatch) -> DecodeRows:
    lengths_R = batch.positions_N[: batch.num_decode] + 1
    longest = int(batch.plan.start[: batch.num_decode].max()) + 1
    rows_R = torch.from_numpy(batch.plan.row[: batch.num_decode].astype(np.int64))
    # Behind a row's end the table holds slots of earlier tenants: harmless to read, and masked.
    slots_RL = batch.tables.slots_RP[rows_R, :longest]
    mask_RL = torch.arange(longest) < lengths_R[:, None]
    return DecodeRows(slots_RL, mask_RL[:, None, None, :])


def chunk_of(batch: ForwardBatch, index: int, first: int) -> Chunk:
    row, start, length = (int(values[index]) for values in (batch.plan.row, batch.plan.start, batch.plan.length))
    slots_P = batch.tables.slots_RP[row, : start + length]
    if start == 0:
        return Chunk(first, length, slots_P, None)
    mask_MP = torch.ones((length, start + length), dtype=torch.bool).tril_(start)
    return Chunk(first, length, slots_P, mask_MP)


def attend_decode(q_RHC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
    num_rows, num_heads, head_dim = q_RHC.shape
    longest, num_kv_heads = rows.slots_RL.shape[1], k_TGC.shape[1]
    flat = rows.slots_RL.reshape(-1)
    k_RGLC, v_RGLC = (
        cached_TGC.index_select(0, flat).to(q_RHC.dtype).view(num_rows, longest, num_kv_heads, head_dim).transpose(1, 2)
        for cached_TGC in (k_TGC, v_TGC)
    )
    # The query heads of one K/V head stand where a sequence of queries would, so K and V are never repeated.
    q_RGQC = q_RHC.reshape(num_rows, num_kv_heads, -1, head_dim)
    o_RGQC = F.scaled_dot_product_attention(q_RGQC, k_RGLC, v_RGLC, attn_mask=rows.mask_R11L)
    return o_RGQC.reshape(num_rows, num_heads, head_dim)


def attend_chunk(q_MHC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    k_GPC, v_GPC = (
        cached_TGC.index_select(0, chunk.slots_P).to(q_MHC.dtype).transpose(0, 1) for cached_TGC in (k_TGC, v_TGC)
    )
    o_HMC = F.scaled_dot_product_attention(
        q_MHC.transpose(0, 1)[None],
        k_GPC[None],
        v_GPC[None],
        attn_mask=chunk.mask_MP,
        is_causal=chunk.mask_MP is None,
        enable_gqa=True,
    )[0]
    return o_HMC.transpose(0, 1)
