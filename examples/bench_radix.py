"""Micro-benchmark of the ledger: what a match, an insert, an eviction and the life of a request cost.

    python -m examples.bench_radix

Prints one JSON line. All is measured in a pool that holds 10k and then 1M cached tokens of prompts of 1,000 tokens, of
which ten at a time share their first 200. Each pass takes other prompts than the one before, so that a big tree is not
measured on the part that happens to be in the CPU's cache; the keys asked for are fresh copies, as requests bring them.
A figure is the best pass: passes last some microseconds, and the best is one that no other process disturbed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np

from examples.host import machine
from radix import Ledger, Tenancy, check_ledger

PROMPT, PREFIX, GROUP = 1000, 200, 10
BATCH = 8  # requests in a pass
DECODE_ROWS, GROWTH = 256, 16  # rows of a decode step; tokens they grow to before they start afresh
PASSES = 400


def best_us(
    before: Callable[[], object], action: Callable[[object], object], after: Callable[[object], object]
) -> float:
    """Microseconds of the fastest pass. Only `action` is timed; it gets what `before` returns and gives to `after`."""
    best = float("inf")
    for _ in range(PASSES):
        given = before()
        start = time.perf_counter()
        result = action(given)
        best = min(best, time.perf_counter() - start)
        after(result)
    return best * 1e6


def nothing(_: object = None) -> None:
    pass


def random_keys(rng: np.random.Generator, count: int, length: int) -> list[bytes]:
    return [line.tobytes() for line in rng.integers(0, 50_000, (count, length), np.int32)]


def prompts(rng: np.random.Generator, cached_tokens: int) -> list[bytes]:
    groups = max(1, cached_tokens // (PREFIX + GROUP * (PROMPT - PREFIX)))
    heads = random_keys(rng, groups, PREFIX)
    return [head + tail for head in heads for tail in random_keys(rng, GROUP, PROMPT - PREFIX)]


def batches(rng: np.random.Generator, keys: list[bytes]) -> Iterator[list[bytes]]:
    """Endless batches of copies of `keys`, each key once before any comes again."""
    queue: list[int] = []
    while True:
        while len(queue) < BATCH:
            queue += rng.permutation(len(keys)).tolist()
        yield [bytes(bytearray(keys[index])) for index in queue[:BATCH]]
        del queue[:BATCH]


def chain_us(rng: np.random.Generator, cached_tokens: int, nodes: int, node_tokens: int) -> float:
    """One `peek` that follows `nodes` nodes of `node_tokens` tokens each."""
    length = nodes * node_tokens
    keys = random_keys(rng, max(1, cached_tokens // length), length)
    ledger = Ledger(num_pages=len(keys) * length, page_size=1, num_rows=1, context_length=length)
    for key in keys:
        tenancy = ledger.open(b"", key, length)
        for end in range(node_tokens, length + 1, node_tokens):
            ledger.share(tenancy, key[: end * 4])
        ledger.close(tenancy, None)
    supply = batches(rng, keys)
    return best_us(lambda: next(supply), lambda batch: [ledger.peek(b"", key) for key in batch], nothing) / BATCH


def measure(cached_tokens: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    shallow, deep = (chain_us(rng, cached_tokens, nodes, 32) for nodes in (16, 32))
    narrow, wide = (chain_us(rng, cached_tokens, 1, tokens) for tokens in (1000, 5000))
    figures = {"match_per_node_us": (deep - shallow) / 16, "match_per_1k_tokens_us": (wide - narrow) / 4}

    keys = prompts(rng, cached_tokens)
    room = BATCH * PROMPT
    ledger = Ledger(num_pages=cached_tokens + room, page_size=1, num_rows=DECODE_ROWS, context_length=2 * PROMPT)
    for key in keys:
        ledger.close(ledger.open(b"", key, PROMPT), key)
    supply = batches(rng, keys)

    def close_all(tenancies: list[Tenancy]) -> None:
        for tenancy in tenancies:
            ledger.close(tenancy, None)

    def open_all(batch: list[bytes]) -> list[Tenancy]:
        return [ledger.open(b"", key, PROMPT) for key in batch]

    figures["match_prompt_us"] = (
        best_us(lambda: next(supply), lambda batch: [ledger.peek(b"", key) for key in batch], nothing) / BATCH
    )
    figures["open_cached_us"] = best_us(lambda: next(supply), open_all, close_all) / BATCH
    figures["close_cached_us"] = best_us(lambda: open_all(next(supply)), close_all, nothing) / BATCH
    figures["open_new_us"] = best_us(lambda: random_keys(rng, BATCH, PROMPT), open_all, close_all) / BATCH

    def opened_new() -> list[tuple[Tenancy, bytes]]:
        fresh = random_keys(rng, BATCH, PROMPT)
        return list(zip(open_all(fresh), fresh, strict=True))

    def share_all(opened: list[tuple[Tenancy, bytes]]) -> list[Tenancy]:
        for tenancy, key in opened:
            ledger.share(tenancy, key)
        return [tenancy for tenancy, _ in opened]

    figures["insert_1k_tokens_us"] = best_us(opened_new, share_all, close_all) / BATCH

    def evict(_: object) -> None:
        ledger.allocator.free(ledger.cache.evict(8 * PROMPT))

    def refill(_: object) -> None:
        for key in random_keys(rng, 8, PROMPT):
            ledger.close(ledger.open(b"", key, PROMPT), key)

    figures["evict_per_1k_tokens_us"] = best_us(nothing, evict, refill) / 8
    check_ledger(ledger)

    decoding: list[Tenancy] = []

    def longer_by_one() -> int:
        if not decoding or decoding[0].allocated == GROWTH:
            close_all(decoding)
            decoding[:] = [ledger.open(b"", b"", 1) for _ in range(DECODE_ROWS)]
        return decoding[0].allocated + 1

    def grow_each(length: int) -> None:
        for tenancy in decoding:
            ledger.grow(tenancy, length)

    def grow_together(length: int) -> None:
        ledger.grow_all(decoding, [length] * DECODE_ROWS)

    figures["grow_one_row_us"] = best_us(longer_by_one, grow_each, nothing) / DECODE_ROWS
    figures["grow_all_per_row_us"] = best_us(longer_by_one, grow_together, nothing) / DECODE_ROWS
    return figures


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    small, large = 10_000, 1_000_000
    figures = {size: measure(size) for size in (small, large)}
    result = {
        "benchmark": "radix",
        "page_size": 1,
        "cached_10k": {name: round(value, 3) for name, value in figures[small].items()},
        "cached_1m": {name: round(value, 3) for name, value in figures[large].items()},
        "ratio": {name: round(figures[large][name] / value, 2) for name, value in figures[small].items()},
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
