"""L4, each rank: what a request asks of its logits before one is drawn, computed on the GPU without a word to the host.

Edits first: penalties, biases (a ban is a bias of -inf) and a grammar's mask. Then the least logit / T that top-k,
top-p and min-p leave; equal logits at a filter's edge are all kept, so what a row keeps never depends on other rows.

Shapes: S sampled rows, V columns of the logits, R table rows, P positions, M single edits, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

BLOCK = 1024

FILTER_PROGRAMS = 128
"""Each takes a row after the other and has room for as many candidates as there are tokens."""

DEPTH = tl.constexpr(12.0)
"""Filters first look at tokens this far below the likeliest in logit / T, and at all of them if these are too few."""

PROMPT = tl.constexpr(1 << 30)
"""Set in a token's count if it occurs in the prompt; the lower bits count it in the output."""


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


def least_kept(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    num_tokens: int,
) -> torch.Tensor:
    """float32 [S]: the least logit / T that top-k (0: all), then top-p, then min-p keep; -inf where all are kept.

    top_p keeps the fewest likeliest tokens whose probability, renormalised over what top_k kept, reaches it; min_p
    keeps what is at least min_p times as likely as the likeliest.
    """
    assert logits_SV.stride(1) == 1
    num_rows, device = len(logits_SV), logits_SV.device
    programs = min(num_rows, FILTER_PROGRAMS)
    candidates_PV = torch.empty((programs, num_tokens), dtype=torch.float32, device=device)
    least_S = torch.empty(num_rows, dtype=torch.float32, device=device)
    _least_kept[(programs,)](
        logits_SV,
        temperature_S,
        top_k_S,
        top_p_S,
        min_p_S,
        candidates_PV,
        least_S,
        num_rows,
        logits_SV.stride(0),
        V=num_tokens,
        BLOCK=8192,
        num_warps=32,
        **LAUNCH,
    )
    return least_S


@triton.jit
def inverse(temperature):
    """What logits are multiplied by: 1 / T, and 1 where T is 0."""
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def scaled(logits, temperature):
    """logits / T; -inf for what is no number."""
    x = logits.to(tl.float32)
    return tl.where(x == x, x, float("-inf")) * inverse(temperature)


# ---- edits ----------------------------------------------------------------------------------------------------------

ROWS = [
    *("rows", "lengths", "prompt_lens", "repetition", "presence", "frequency", "indices", "ids", "values"),
    *("temperature", "top_k", "top_p", "min_p", "least"),
]
"""Arguments that come from anywhere in a longer tensor: no variants are compiled for how they are aligned."""


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


# ---- filters --------------------------------------------------------------------------------------------------------


@triton.jit
def key_of(x):
    """An integer that is ordered as the floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def collect(logits, temperature, candidates, best, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what reaches the floor to `candidates`; returns their number, their mass, and the mass of all.

    A token's mass is its probability relative to the likeliest token's.
    """
    lane = tl.arange(0, BLOCK)
    kept_mass = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    count = 0
    for first in range(0, V, BLOCK):
        x = tl.load(logits + first + lane, mask=first + lane < V, other=float("-inf"))
        x = scaled(x, temperature)
        kept = (x >= floor) & (x > float("-inf"))
        number = kept.to(tl.int32)
        tl.store(candidates + count + tl.cumsum(number, axis=0) - 1, x, mask=kept)
        share = tl.exp(x - best)
        mass += share
        kept_mass += tl.where(kept, share, 0.0)
        count += tl.sum(number, axis=0)
    tl.debug_barrier()
    return count, tl.sum(kept_mass, axis=0), tl.sum(mass, axis=0)


@triton.jit
def reaching(candidates, number, least, best, BLOCK: tl.constexpr):
    """How many candidates reach `least`, and their mass."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    first = 0
    while first < number:
        x = tl.load(candidates + first + lane, mask=first + lane < number, other=float("-inf"))
        reached = x >= least
        count += reached.to(tl.int32)
        mass += tl.where(reached, tl.exp(x - best), 0.0)
        first += BLOCK
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def highest_with(candidates, number, wanted_count, wanted_mass, low, best, BLOCK: tl.constexpr):
    """The largest value, at least `low`, that so many candidates with so much mass reach."""
    at_least = key_of(low).to(tl.int64)
    at_most = key_of(best).to(tl.int64)
    while at_least < at_most:
        middle = (at_least + at_most + 1) >> 1
        count, mass = reaching(candidates, number, value_of(middle.to(tl.int32)), best, BLOCK)
        if (count >= wanted_count) & (mass >= wanted_mass):
            at_least = middle
        else:
            at_most = middle - 1
    return value_of(at_least.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROWS)
def _least_kept(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    candidates,
    least_out,
    num_rows,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    candidates += tl.program_id(0).to(tl.int64) * V
    s = tl.program_id(0)
    follow()
    while s < num_rows:
        t = tl.load(temperature + s)
        k = tl.load(top_k + s).to(tl.int32)
        k = tl.where(k < V, k, 0)
        p = tl.load(top_p + s)
        m = tl.load(min_p + s)
        least = tl.full((), float("-inf"), tl.float32)
        if (t > 0) & ((k > 0) | (p < 1) | (m > 0)):
            least = least_of_row(logits + s.to(tl.int64) * stride, t, k, p, m, candidates, V, BLOCK)
        tl.store(least_out + s, least)
        s += tl.num_programs(0)


@triton.jit
def least_of_row(logits, t, k, p, m, candidates, V: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(logits + first + lane, mask=first + lane < V, other=float("-inf"))
        highest = tl.maximum(highest, scaled(x, t))
    best = tl.max(highest, axis=0)
    least = tl.where(m > 0, best + tl.log(m), float("-inf"))
    if best == float("inf"):
        least = best
    elif (best > float("-inf")) & ((k > 0) | (p < 1)):
        low = best - DEPTH
        number, mass, total = collect(logits, t, candidates, best, low, V, BLOCK)
        if (k > number) | ((k == 0) & (mass < p * total)):
            low = tl.full((), float("-inf"), tl.float32)
            number, mass, total = collect(logits, t, candidates, best, low, V, BLOCK)
        if k > 0:
            total = mass
            if k < number:
                low = highest_with(candidates, number, k, 0.0, low, best, BLOCK)
                # Of the equal ones at the edge as many count as it takes to make k.
                above, total = reaching(candidates, number, value_of(key_of(low) + 1), best, BLOCK)
                total += (k - above).to(tl.float32) * tl.exp(low - best)
                least = tl.maximum(least, low)
        if p < 1:
            least = tl.maximum(least, highest_with(candidates, number, 0, p * total, low, best, BLOCK))
    # The next row's candidates take these's place.
    tl.debug_barrier()
    return least
