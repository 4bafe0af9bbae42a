"""L5, frontend: which of several engines serves a request. Owns an index of what each is thought to have cached.

The index is a radix tree as the engine's own, fed with the same token ids: a prompt when it is sent, an answer when it
is over. Each engine is then asked what the request would cost there, in tokens of prompt to compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radix.radix_cache import RadixCache
from radix.tree import TOKEN_BYTES, Node

RUNNING_COST = 128
"""What a request that runs counts for, in tokens of prompt. The tokens that it is still to generate slow down the steps
in which it takes part by about as much: on an H200, a row in a step of an 8B model costs as much as two such tokens."""

COMPUTING_COST = 2
"""What a token that is not cached counts for, beside one that others wait for too: computing it delays this request and
whoever comes behind it."""


@dataclass(eq=False, slots=True)
class Assigned:
    """A generation of one engine."""

    engine: int
    tokens: bytearray  # of the prompt and of the answer so far, int32
    node: Node  # where its path in the index ends, locked
    indexed: int  # tokens of that path
    cost: int  # that it adds to its engine's load


def make_balancer(
    method: str, pool_tokens: Sequence[int], page_size: int, cache_enabled: bool = True, first: int = 0
) -> RoundRobin | CacheAware:
    """For as many engines as there are pools. Of several processes that take turns each has a `first` of its own."""
    if method == "round_robin" or len(pool_tokens) == 1:
        return RoundRobin(len(pool_tokens), first)
    return CacheAware(pool_tokens, page_size, cache_enabled)


class RoundRobin:
    """One engine after the other."""

    def __init__(self, num_engines: int, first: int = 0) -> None:
        turns = [Turn((first + engine) % num_engines) for engine in range(num_engines)]
        self._turns = itertools.cycle(turns)

    def assign(self, namespace: bytes, ids: bytes) -> Turn:
        return next(self._turns)

    def heard(self, assignment: Turn, ids: bytes) -> None:
        pass

    def ended(self, assignment: Turn) -> None:
        pass

    def flushed(self, engine: int) -> None:
        pass


@dataclass(frozen=True)
class Turn:
    engine: int


class CacheAware:
    """The engine where least has to be computed for the request, now or later.

    That is the part of the prompt that is not cached there, what others have to compute before it, and as many tokens
    as have to be evicted for it, which somebody may want again. Of equals the one with the fewest cached tokens.
    """

    def __init__(self, pool_tokens: Sequence[int], page_size: int, cache_enabled: bool = True) -> None:
        """Tokens that each engine's cache holds. Where none is kept requests are shared out by load alone."""
        self._engines = [_Engine(tokens, page_size, cache_enabled) for tokens in pool_tokens]

    def assign(self, namespace: bytes, ids: bytes) -> Assigned:
        costs = [(engine.cost(namespace, ids), engine.cache.cached_tokens) for engine in self._engines]
        chosen = costs.index(min(costs))
        return self._engines[chosen].begin(chosen, namespace, ids)

    def heard(self, assignment: Assigned, ids: bytes) -> None:
        self._engines[assignment.engine].heard(assignment, ids)

    def ended(self, assignment: Assigned) -> None:
        self._engines[assignment.engine].end(assignment)

    def flushed(self, engine: int) -> None:
        """What still runs stays in the index, where it is locked."""
        cache = self._engines[engine].cache
        cache.evict(cache.evictable_tokens)


class _Engine:
    """What one engine is thought to have cached, and what it has to do, in tokens of prompt."""

    def __init__(self, pool_tokens: int, page_size: int, cache_enabled: bool) -> None:
        self.cache = RadixCache(page_size)
        self.load = 0
        self._pool_tokens = pool_tokens
        self._page_size = page_size
        self._cache_enabled = cache_enabled

    def cost(self, namespace: bytes, ids: bytes) -> int:
        new = len(ids) // TOKEN_BYTES - self.cache.match(namespace, ids).length
        return self.load + COMPUTING_COST * new + max(0, self.cache.cached_tokens + new - self._pool_tokens)

    def begin(self, number: int, namespace: bytes, ids: bytes) -> Assigned:
        match = self.cache.match(namespace, ids)
        node = self.cache.acquire(namespace, match)
        new = len(ids) // TOKEN_BYTES - match.length
        assigned = Assigned(number, bytearray(ids), node, match.length, new + RUNNING_COST)
        self.load += assigned.cost
        self._index(assigned)
        return assigned

    def heard(self, assigned: Assigned, ids: bytes) -> None:
        """Once it generates, its prompt is computed."""
        self.load += RUNNING_COST - assigned.cost
        assigned.cost = RUNNING_COST
        assigned.tokens += ids

    def end(self, assigned: Assigned) -> None:
        self.load -= assigned.cost
        self._index(assigned)
        self.cache.release(assigned.node)

    def _index(self, assigned: Assigned) -> None:
        """Enters what is known of its tokens by now; the oldest others go where the engine's own would."""
        if not self._cache_enabled:
            return
        start = assigned.indexed
        end = len(assigned.tokens) // TOKEN_BYTES // self._page_size * self._page_size
        if end > start:
            key = bytes(memoryview(assigned.tokens)[: end * TOKEN_BYTES])
            slots = np.zeros(end - start, np.int32)  # nobody asks where they lie
            assigned.node, _ = self.cache.insert(assigned.node, key, start, slots)
            assigned.indexed = end
        excess = min(self.cache.cached_tokens - self._pool_tokens, self.cache.evictable_tokens)
        if excess > 0:
            self.cache.evict(excess)
