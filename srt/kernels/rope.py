"""L4, each rank: from projected queries, keys and values to rotated queries and a filled K/V cache, in one launch.

Shapes: N tokens, H query heads, G key/value heads, S = H + 2 G, C head_dim, F = C / 2 pairs, P positions, T slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

ELEMENTS = 2048
"""Per program: whole heads, at twice 16 bytes a thread for 4 warps."""


def rotate_and_store(
    qkv_NSC: torch.Tensor,
    turns_P2F: torch.Tensor,
    positions_N: torch.Tensor,
    slots_N: torch.Tensor,
    kv_layer: torch.Tensor,
    q_norm_C: torch.Tensor | None = None,
    k_norm_C: torch.Tensor | None = None,
    eps: float = 0.0,
    q_NHC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotated queries [N, H, C]; rotated keys and plain values go to `kv_layer` [2, T, G, C] at their tokens' slots.

    `turns_P2F` holds each position's cosines, then sines, in float32; a pair is the dimensions (2 i, 2 i + 1). With
    `q_norm_C` and `k_norm_C` each query and key head first passes an RMS norm. All in float32 between load and store.
    In fp8 (e4m3) the K/V are the nearest numbers there are, 448 at most. `q_NHC`, contiguous, takes the queries if
    given.
    """
    num_tokens, num_heads_all, head_dim = qkv_NSC.shape
    num_kv_heads = kv_layer.shape[2]
    num_heads = num_heads_all - 2 * num_kv_heads
    assert qkv_NSC.stride(2) == 1
    assert qkv_NSC.stride(1) == head_dim
    assert kv_layer.stride(3) == 1
    assert turns_P2F.is_contiguous()
    assert (q_norm_C is None) == (k_norm_C is None)
    if q_NHC is None:
        q_NHC = qkv_NSC.new_empty((num_tokens, num_heads, head_dim))
    assert q_NHC.shape == (num_tokens, num_heads, head_dim)
    assert q_NHC.is_contiguous()
    if num_tokens:
        block_c = triton.next_power_of_2(head_dim)
        block_s = max(ELEMENTS // block_c, 1)
        _rotate_and_store[(num_tokens, triton.cdiv(num_heads_all, block_s))](
            qkv_NSC,
            turns_P2F,
            positions_N,
            slots_N,
            kv_layer,
            q_norm_C,
            k_norm_C,
            q_NHC,
            eps,
            qkv_NSC.stride(0),
            kv_layer.stride(0),
            kv_layer.stride(1),
            kv_layer.stride(2),
            H=num_heads,
            G=num_kv_heads,
            C=head_dim,
            BLOCK_S=block_s,
            BLOCK_C=block_c,
            num_warps=4,
            **LAUNCH,
        )
    return q_NHC


@triton.jit(do_not_specialize=["positions", "slots"])
def _rotate_and_store(
    qkv,
    turns,
    positions,
    slots,
    kv,
    q_norm,
    k_norm,
    q_out,
    eps,
    qkv_stride,
    kv_stride_kind,
    kv_stride_slot,
    kv_stride_head,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    f = tl.arange(0, BLOCK_C // 2)[None, :]
    inside = (s < H + 2 * G) & (c < C)
    is_query = s < H
    is_value = s >= H + G
    follow()
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    x = tl.load(qkv + token * qkv_stride + s * C + c, mask=inside, other=0.0).to(tl.float32)

    if q_norm is not None:
        weight = tl.where(
            is_query,
            tl.load(q_norm + c, mask=c < C, other=0.0).to(tl.float32),
            tl.load(k_norm + c, mask=c < C, other=0.0).to(tl.float32),
        )
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / C + eps)
        x = tl.where(is_value, x, x * scale * weight)

    place = turns + position * C + f
    cos = tl.load(place, mask=f < C // 2, other=0.0)
    sin = tl.load(place + C // 2, mask=f < C // 2, other=0.0)
    cos = tl.where(is_value, 1.0, cos)
    sin = tl.where(is_value, 0.0, sin)
    even, odd = tl.split(tl.reshape(x, (BLOCK_S, BLOCK_C // 2, 2)))
    y = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_S, BLOCK_C))

    tl.store(q_out + (token * H + s) * C + c, y.to(q_out.dtype.element_ty), mask=inside & is_query)
    if kv.dtype.element_ty == tl.float8e4nv:  # beyond its largest number come only NaNs
        y = tl.clamp(y, -448.0, 448.0)
    kind = is_value.to(tl.int64)
    head = s - H - kind * G
    target = kv + kind * kv_stride_kind + slot * kv_stride_slot + head * kv_stride_head + c
    tl.store(target, y.to(kv.dtype.element_ty), mask=inside & (s >= H))
