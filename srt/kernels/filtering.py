"""L4, each rank: the least logit / T that top-k, top-p and min-p leave of a row, found without a sort or the host.

Equal logits at a filter's edge are all kept, so what a row keeps never depends on other rows.

Shapes: S sampled rows, V columns of the logits, P programs, B elements of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.kernels.launch import LAUNCH, follow

BLOCK = 8192

PROGRAMS = 128
"""Each takes a row after the other and has room for as many candidates as there are tokens."""

DEPTH = tl.constexpr(12.0)
"""Filters first look at tokens this far below the likeliest in logit / T, and at all of them if these are too few."""

ROWS = ["temperature", "top_k", "top_p", "min_p", "least_out"]
"""Arguments that come from anywhere in a longer tensor: no variants are compiled for how they are aligned."""


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
    programs = min(num_rows, PROGRAMS)
    candidates_PV = torch.empty((programs, num_tokens), dtype=torch.float32, device=device)
    near_PB = torch.empty((programs, BLOCK), dtype=torch.float32, device=device)
    least_S = torch.empty(num_rows, dtype=torch.float32, device=device)
    _least_kept[(programs,)](
        logits_SV,
        temperature_S,
        top_k_S,
        top_p_S,
        min_p_S,
        candidates_PV,
        near_PB,
        least_S,
        num_rows,
        logits_SV.stride(0),
        V=num_tokens,
        BLOCK=BLOCK,
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
def highest_with(candidates, number, wanted_count, wanted_mass, low, best, near, BLOCK: tl.constexpr):
    """The largest value, at least `low`, that so many candidates with so much mass reach.

    Between `at_least`, which enough reach, and the first value above `at_most`, which too few reach, first halves the
    distance until a block holds what lies there, and then the number of values.
    """
    at_least = key_of(low).to(tl.int64)
    at_most = key_of(best).to(tl.int64)
    above = 0
    mass_above = tl.full((), 0.0, tl.float32)
    left = number
    while (at_least < at_most) & (left > BLOCK):
        middle = (at_least + at_most + 1) >> 1
        low_value = value_of(at_least.to(tl.int32))
        if low_value > float("-inf"):
            half = key_of(0.5 * low_value + 0.5 * value_of(at_most.to(tl.int32))).to(tl.int64)
            middle = tl.minimum(tl.maximum(half, at_least + 1), at_most)
        count, mass = reaching(candidates, number, value_of(middle.to(tl.int32)), best, BLOCK)
        if (count >= wanted_count) & (mass >= wanted_mass):
            at_least = middle
            left = count - above
        else:
            at_most = middle - 1
            left -= count - above
            above = count
            mass_above = mass
    if at_least < at_most:
        x = gather_between(
            candidates, number, value_of(at_least.to(tl.int32)), value_of(at_most.to(tl.int32)), near, BLOCK
        )
        share = tl.exp(x - best)
        while at_least < at_most:
            middle = (at_least + at_most + 1) >> 1
            reached = x >= value_of(middle.to(tl.int32))
            count = above + tl.sum(reached.to(tl.int32), axis=0)
            mass = mass_above + tl.sum(tl.where(reached, share, 0.0), axis=0)
            if (count >= wanted_count) & (mass >= wanted_mass):
                at_least = middle
            else:
                at_most = middle - 1
    return value_of(at_least.to(tl.int32))


@triton.jit
def gather_between(candidates, number, least, most, near, BLOCK: tl.constexpr):
    """The candidates from `least` to `most`, at most a block of them, by way of the memory at `near`."""
    lane = tl.arange(0, BLOCK)
    count = 0
    first = 0
    while first < number:
        x = tl.load(candidates + first + lane, mask=first + lane < number, other=float("-inf"))
        between = (x >= least) & (x <= most) & (first + lane < number)
        kept = between.to(tl.int32)
        tl.store(near + count + tl.cumsum(kept, axis=0) - 1, x, mask=between)
        count += tl.sum(kept, axis=0)
        first += BLOCK
    tl.debug_barrier()
    x = tl.load(near + lane, mask=lane < count, other=float("-inf"))
    tl.debug_barrier()
    return x


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROWS)
def _least_kept(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    candidates,
    near,
    least_out,
    num_rows,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    candidates += tl.program_id(0).to(tl.int64) * V
    near += tl.program_id(0) * BLOCK
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
            least = least_of_row(logits + s.to(tl.int64) * stride, t, k, p, m, candidates, near, V, BLOCK)
        tl.store(least_out + s, least)
        s += tl.num_programs(0)


@triton.jit
def least_of_row(logits, t, k, p, m, candidates, near, V: tl.constexpr, BLOCK: tl.constexpr):
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
                low = highest_with(candidates, number, k, 0.0, low, best, near, BLOCK)
                # Of the equal ones at the edge as many count as it takes to make k.
                above, total = reaching(candidates, number, value_of(key_of(low) + 1), best, BLOCK)
                total += (k - above).to(tl.float32) * tl.exp(low - best)
                least = tl.maximum(least, low)
        if p < 1:
            least = tl.maximum(least, highest_with(candidates, number, 0, p * total, low, best, near, BLOCK))
    # The next row's candidates take these's place.
    tl.debug_barrier()
    return least
