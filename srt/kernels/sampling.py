"""L4, each rank: from logits to tokens on the GPU, without a word to the host.

The noise is the function of (seed, position, token id) that `srt/executor/noise.py` documents; a row's token depends on
its own logits and parameters only, never on the batch.

Shapes: S sampled rows, V columns of the logits, of which the first `num_tokens` exist, K parts that a row is cut into;
R ranks, or rows of the token table with P positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from srt.kernels.edits import Biases, Masks, Penalties, edited, is_allowed
from srt.kernels.filtering import inverse, least_kept
from srt.kernels.launch import COMPILED, LAUNCH, follow

BLOCK = 1024
BLOCKS = 8
LOWEST = tl.constexpr(-3.0e38)
PROGRAMS = 2400
"""As many of 4 warps as run at once on a large GPU, about."""

ROWS = ["temperature", "seeds", "positions", "least", "indices", "rows", "tokens"]
"""Arguments that come from anywhere in a longer tensor: no variants are compiled for how they are aligned."""


def gumbel_argmax(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_S: torch.Tensor,
    num_tokens: int,
    least_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [S]: the argmax of logits where the temperature is 0, else of logits / T plus Gumbel noise.

    Ties go to the lowest id, and what is no number counts as -inf. `positions_S` are the places that the tokens will
    take; seeds and positions are int64. With `least_S`, only tokens whose logit / T reaches it can be drawn.
    """
    best_2S = best_of_shard(logits_SV, temperature_S, seeds_S, positions_S, range(num_tokens), least_S)
    return best_2S[1].view(torch.int32)


def best_of_shard(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_S: torch.Tensor,
    tokens: range,
    least_S: torch.Tensor | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """What `gumbel_argmax` compares and its token, float32 and int32 in float32 [2, S], from the logits of `tokens`.

    `masks` are of the whole vocabulary. What one allows is drawn before all else, though it were no number.
    """
    assert logits_SV.stride(1) == 1
    assert masks is None or not tokens or masks.bits.shape[1] * 32 >= tokens.stop
    num_tokens = len(tokens)
    num_rows, device = len(logits_SV), logits_SV.device
    all_blocks = max(triton.cdiv(num_tokens, BLOCK), 1)
    # Two variants to compile: of one block, to spread few rows over the GPU, and of several.
    blocks = 1 if all_blocks * num_rows <= PROGRAMS else BLOCKS
    parts = triton.cdiv(all_blocks, blocks)
    best_SK = torch.empty((num_rows, parts), dtype=torch.float32, device=device)
    ids_SK = torch.empty((num_rows, parts), dtype=torch.int32, device=device)
    best_2S = torch.empty((2, num_rows), dtype=torch.float32, device=device)
    _best_of_part[(num_rows, parts)](
        logits_SV,
        temperature_S,
        seeds_S,
        positions_S,
        least_S,
        masks and masks.indices_S,
        masks and masks.bits,
        best_SK,
        ids_SK,
        logits_SV.stride(0),
        masks and masks.bits.stride(0),
        tokens.start,
        num_tokens,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        num_warps=4,
        **LAUNCH,
    )
    _take_best(best_SK, ids_SK, best_2S, triton.next_power_of_2(all_blocks))
    return best_2S


def best_of_shards(best_R2S: torch.Tensor) -> torch.Tensor:
    """`gumbel_argmax` of a vocabulary, from what `best_of_shard` gave for each rank's part of it."""
    best_2S = torch.empty_like(best_R2S[0])
    best_SR, ids_SR = best_R2S.permute(1, 2, 0)
    _take_best(best_SR, ids_SR.view(torch.int32), best_2S, triton.next_power_of_2(len(best_R2S)))
    return best_2S[1].view(torch.int32)


def _take_best(best_SK: torch.Tensor, ids_SK: torch.Tensor, best_2S: torch.Tensor, block: int) -> None:
    """`block`: a power of two from K on."""
    num_rows, parts = best_SK.shape
    score_S, token_S = best_2S
    _best_of_parts[(num_rows,)](
        best_SK,
        ids_SK,
        score_S,
        token_S.view(torch.int32),
        parts,
        *best_SK.stride(),
        BLOCK=block,
        num_warps=1,
        **LAUNCH,
    )


def filtered(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    seeds_S: torch.Tensor,
    positions_S: torch.Tensor,
    num_tokens: int,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    penalties: Penalties | None = None,
    biases: Biases | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """`gumbel_argmax` of what the edits, then top-k (0: all), top-p (1: all) and min-p (0: all) leave of each row."""
    if penalties is not None or biases is not None or masks is not None:
        logits_SV = edited(logits_SV, num_tokens, penalties, biases, masks)
    least_S = least_kept(logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, num_tokens)
    return gumbel_argmax(logits_SV, temperature_S, seeds_S, positions_S, num_tokens, least_S)


def write_tokens(
    tokens_S: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor, tokens_RP: torch.Tensor
) -> None:
    """tokens_RP[rows, positions] = tokens, except where the row is negative."""
    num_rows = len(tokens_S)
    _write_tokens[(triton.cdiv(num_rows, 128),)](
        tokens_S, rows_S, positions_S, tokens_RP, num_rows, tokens_RP.stride(0), BLOCK=128, num_warps=4, **LAUNCH
    )


@triton.jit
def row_key(seed, position):
    """SplitMix64's word, as its low and its high half in int32."""
    z = seed.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return z.to(tl.uint32).to(tl.int32, bitcast=True), (z >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def gumbel(low, high, token):
    """-log(-log(1 - v)) of a token's word v in (0, 1). Small v, which decide, keep all their digits."""
    x = token * -1640531527 + low
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= high
    x ^= x >> 15
    x *= -2073254261
    x ^= x >> 16
    v = x.to(tl.float32) * 4.6566123179658803e-10 + 1.1641532182693481e-10
    # -log(1 - v) = v + v²/2 + v³/3 + …
    series = v + v * v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4 + v * (1.0 / 5))))
    return -log(tl.where(v < 1.0 / 32, series, -log(1.0 - v)))


@triton.jit
def log(x):
    """The processor's own, good to about 2e-7 plus rounding."""
    if COMPILED:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def masked(x, bits, index, bits_stride, token, num_tokens):
    """What is allowed is better than all else, though it were no number; an index below 0 allows all as it is."""
    if index >= 0:
        allowed = is_allowed(bits, index, bits_stride, token, num_tokens)
        x = tl.where(allowed, tl.where(x > LOWEST, x, LOWEST), float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _best_of_part(
    logits,
    temperature,
    seeds,
    positions,
    least,
    indices,
    bits,
    best_out,
    ids_out,
    stride,
    bits_stride,
    first,
    num_tokens,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    follow()
    t = tl.load(temperature + s)
    low, high = row_key(tl.load(seeds + s), tl.load(positions + s))
    scale = inverse(t)
    index = tl.full((), -1, tl.int64)
    if indices is not None:
        index = tl.load(indices + s).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = token
    for _ in range(BLOCKS):
        x = tl.load(logits + s * stride + token, mask=token < num_tokens, other=float("-inf"))
        x = x.to(tl.float32) * scale
        if t > 0:
            if least is not None:
                x = tl.where(x >= tl.load(least + s), x, float("-inf"))
            x += gumbel(low, high, first + token)
        if bits is not None:
            x = masked(x, bits, index, bits_stride, first + token, first + num_tokens)
        better = x > best  # never, if x is no number
        best = tl.where(better, x, best)
        best_token = tl.where(better, token, best_token)
        token += BLOCK
    highest = tl.max(best, axis=0)
    place = s * tl.num_programs(1) + part
    tl.store(best_out + place, highest)
    tl.store(ids_out + place, first + tl.min(tl.where(best == highest, best_token, 0x7FFFFFFF), axis=0))


@triton.jit(do_not_specialize=["parts", "stride", "part_stride"], do_not_specialize_on_alignment=["scores", "tokens"])
def _best_of_parts(best, ids, scores, tokens, parts, stride, part_stride, BLOCK: tl.constexpr):
    s = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    place = s * stride + k * part_stride
    follow()
    value = tl.load(best + place, mask=k < parts, other=float("-inf"))
    token = tl.load(ids + place, mask=k < parts, other=0x7FFFFFFF)
    highest = tl.max(value, axis=0)
    tl.store(scores + s, highest)
    tl.store(tokens + s, tl.min(tl.where(value == highest, token, 0x7FFFFFFF), axis=0))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROWS)
def _write_tokens(tokens, rows, positions, table, num_rows, stride, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_rows
    follow()
    row = tl.load(rows + s, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions + s, mask=inside, other=0).to(tl.int64)
    token = tl.load(tokens + s, mask=inside, other=0)
    tl.store(table + row * stride + position, token.to(table.dtype.element_ty), mask=row >= 0)
