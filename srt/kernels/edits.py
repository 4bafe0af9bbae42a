"""L4, each rank: what changes single logits before a token is drawn: penalties, biases and a grammar's mask.

Shapes: S sampled rows, V columns of the logits, R table rows, P positions, M single edits, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

BLOCK = 1024

PROMPT = tl.constexpr(1 << 30)
"""Set in a token's count if it occurs in the prompt; the lower bits count it in the output."""


ROWS = [
    *("rows", "lengths", "prompt_lens", "repetition", "presence", "frequency", "indices", "ids", "values"),
]
"""Arguments that come from anywhere in a longer tensor: no variants are compiled for how they are aligned."""


@dataclass(frozen=True)
class Penalties:
    """Of every row; 1, 0 and 0 are none. All float32 but the integers that say where a row's tokens are."""

    repetition_S: torch.Tensor  # Keskar et al. 2019, over prompt and output
    presence_S: torch.Tensor  # OpenAI's, over the output, as is
    frequency_S: torch.Tensor
    rows_S: torch.Tensor  # of the token table
    lengths_S: torch.Tensor  # tokens that are known
    prompt_lens_S: torch.Tensor
    tokens_RP: torch.Tensor


@dataclass(frozen=True)
class Biases:
    """values are added to logits [indices, ids]; no pair may come twice but for a bias and a ban."""

    indices_M: torch.Tensor  # of S
    ids_M: torch.Tensor
    values_M: torch.Tensor  # float32


@dataclass(frozen=True)
class Masks:
    """Bit t % 32 of word t // 32 is set where token t is allowed."""

    indices_S: torch.Tensor  # each row's row of `bits`, -1 for none
    bits: torch.Tensor  # int32 [any, W]


def edited(
    logits_SV: torch.Tensor,
    num_tokens: int,
    penalties: Penalties | None = None,
    biases: Biases | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """A float32 copy of the logits with the edits done. Where a mask leaves nothing, all that it allows is equal."""
    num_rows, width = logits_SV.shape
    device = logits_SV.device
    y_SV = torch.empty((num_rows, width), dtype=torch.float32, device=device)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    counts_SV = None
    if penalties is not None:
        counts_SV = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        _count_tokens[(num_rows, 8)](
            counts_SV,
            penalties.rows_S,
            penalties.lengths_S,
            penalties.prompt_lens_S,
            penalties.repetition_S,
            penalties.presence_S,
            penalties.frequency_S,
            penalties.tokens_RP,
            penalties.tokens_RP.stride(0),
            width,
            PROGRAMS=8,
            BLOCK=BLOCK,
            num_warps=4,
            **LAUNCH,
        )
    _penalise[grid](
        logits_SV,
        y_SV,
        counts_SV,
        penalties and penalties.repetition_S,
        penalties and penalties.presence_S,
        penalties and penalties.frequency_S,
        logits_SV.stride(0),
        width,
        BLOCK=BLOCK,
        num_warps=4,
        **LAUNCH,
    )
    if biases is not None and len(biases.ids_M):
        count = len(biases.ids_M)
        _add_biases[(triton.cdiv(count, 128),)](
            y_SV,
            biases.indices_M,
            biases.ids_M,
            biases.values_M,
            count,
            width,
            BLOCK=128,
            num_warps=4,
            **LAUNCH,
        )
    if masks is not None:
        words = masks.bits.shape[1]
        assert words * 32 >= num_tokens
        blocks = triton.cdiv(num_tokens, BLOCK)
        best = torch.empty((num_rows, blocks), dtype=torch.float32, device=device)
        arguments = (y_SV, best, masks.indices_S, masks.bits, masks.bits.stride(0), width, num_tokens, blocks)
        _forbid[(num_rows, blocks)](*arguments, BLOCK=BLOCK, num_warps=4, **LAUNCH)
        most = triton.next_power_of_2(blocks)
        _allow_if_none[(num_rows, blocks)](*arguments, BLOCK=BLOCK, MOST_BLOCKS=most, num_warps=4, **LAUNCH)
    return y_SV


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _count_tokens(
    counts,
    rows,
    lengths,
    prompt_lens,
    repetition,
    presence,
    frequency,
    tokens,
    stride,
    width,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    follow()
    penalised = (tl.load(repetition + s) != 1) | (tl.load(presence + s) != 0) | (tl.load(frequency + s) != 0)
    length = tl.where(penalised, tl.load(lengths + s), 0)
    prompt_len = tl.load(prompt_lens + s)
    row = tokens + tl.load(rows + s).to(tl.int64) * stride
    while first < length:
        position = first + tl.arange(0, BLOCK)
        token = tl.load(row + position, mask=position < length, other=width)
        counted = (token >= 0) & (token < width)
        tl.atomic_add(counts + s * width + token, 1, mask=counted & (position >= prompt_len), sem="relaxed")
        tl.atomic_or(counts + s * width + token, PROMPT, mask=counted & (position < prompt_len), sem="relaxed")
        first += PROGRAMS * BLOCK


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _penalise(logits, y, counts, repetition, presence, frequency, stride, width, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    follow()
    x = tl.load(logits + s * stride + token, mask=inside, other=0.0).to(tl.float32)
    if counts is not None:
        count = tl.load(counts + s * width + token, mask=inside, other=0)
        factor = tl.load(repetition + s)
        in_output = count & (PROMPT - 1)
        x = tl.where(count > 0, tl.where(x > 0, x / factor, x * factor), x)
        loss = tl.load(frequency + s) * in_output.to(tl.float32) + tl.load(presence + s)
        x = tl.where(in_output > 0, x - loss, x)
    tl.store(y + s * width + token, x, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=ROWS)
def _add_biases(y, indices, ids, values, count, width, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = m < count
    follow()
    s = tl.load(indices + m, mask=inside, other=0).to(tl.int64)
    token = tl.load(ids + m, mask=inside, other=width)
    value = tl.load(values + m, mask=inside, other=0.0)
    # Atomic, as a token may have a bias and a ban; their sum is -inf in any order.
    tl.atomic_add(y + s * width + token, value, mask=inside & (token < width), sem="relaxed")


@triton.jit
def is_allowed(bits, index, bits_stride, token, num_tokens):
    word = tl.load(bits + index * bits_stride + token // 32, mask=token < num_tokens, other=0)
    return (word >> (token % 32)) & 1 != 0


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _forbid(y, best, indices, bits, bits_stride, width, num_tokens, blocks, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow()
    index = tl.load(indices + s).to(tl.int64)
    if index >= 0:
        x = tl.load(y + s * width + token, mask=token < num_tokens, other=float("-inf"))
        x = tl.where(is_allowed(bits, index, bits_stride, token, num_tokens), x, float("-inf"))
        tl.store(y + s * width + token, x, mask=token < num_tokens)
        tl.store(best + s * blocks + tl.program_id(1), tl.max(x, axis=0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _allow_if_none(
    y, best, indices, bits, bits_stride, width, num_tokens, blocks, BLOCK: tl.constexpr, MOST_BLOCKS: tl.constexpr
):
    """A grammar at its end allows nothing but what a ban forbids; the grammar's word counts."""
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.arange(0, MOST_BLOCKS)
    follow()
    index = tl.load(indices + s).to(tl.int64)
    if index >= 0:
        highest = tl.max(tl.load(best + s * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)
        if highest == float("-inf"):
            allowed = is_allowed(bits, index, bits_stride, token, num_tokens)
            tl.store(y + s * width + token, 0.0, mask=allowed & (token < num_tokens))
