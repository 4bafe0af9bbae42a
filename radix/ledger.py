"""L3, each rank: the ledger, as the scheduler sees it. Owns the tenancies: what each running request holds.

Every slot of the pool is in one of three places: free, cached in the tree, or held by one row. A request's row begins
with slots that the tree owns and the request has locked (`shared` tokens), followed by its own. The whole is a pure
function of the calls made: no clock, no randomness, no order that depends on a hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix.allocator import TokenToKVPoolAllocator
from radix.host_tier import HostTier
from radix.radix_cache import Match, PageObserver, RadixCache
from radix.req_to_token_pool import ReqToTokenPool
from radix.tree import TOKEN_BYTES, Node
from radix.trunks import Trunk, trunks


@dataclass(slots=True, eq=False)
class Tenancy:
    """One running request's hold on the ledger. Read by the scheduler, written by the ledger alone."""

    row: int
    namespace: bytes
    shared: int  # tokens at the head of the row that the tree owns, locked through `node`
    allocated: int  # slots that the row has, a multiple of the page size
    node: Node  # the deepest locked node
    cached_tokens: int  # what matched when it was opened
    revived: int  # of these, what lay in the pool and no other tenancy was using
    restored: int  # of these, what comes from host memory


class Ledger:
    """Sizes are in tokens unless a name says pages. Keys are int32 token ids as little-endian bytes from position 0."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_rows: int,
        context_length: int,
        cache_enabled: bool = True,
        host_pages: int = 0,
        restore_least: int = 1,
        observer: PageObserver | None = None,
    ) -> None:
        """With `host_pages` evicted prefixes move to host memory; `restore_least` tokens or more come back."""
        self.page_size = page_size
        self.capacity = num_pages * page_size
        self.evicted_total = 0  # tokens evicted to make room, since the start
        self.tenancies: list[Tenancy | None] = [None] * num_rows  # by row
        self.allocator = TokenToKVPoolAllocator(num_pages, page_size)
        self.pool = ReqToTokenPool(num_rows, self._whole_pages(context_length))
        self.table = self.pool.table  # int32 [num_rows, context length rounded up to pages], the slot of each position
        self.host = HostTier(host_pages, page_size, restore_least) if host_pages else None
        self.cache = RadixCache(page_size, observer, self.host)
        self._cache_enabled = cache_enabled
        self._table_pages = self.table.reshape(-1, page_size)  # a view of the table, one line per page of a row

    @property
    def free_rows(self) -> int:
        return len(self.pool.free_rows)

    @property
    def free_tokens(self) -> int:
        return self.allocator.free_tokens

    @property
    def cached_tokens(self) -> int:
        return self.cache.cached_tokens

    @property
    def evictable_tokens(self) -> int:
        return self.cache.evictable_tokens

    @property
    def locked_tokens(self) -> int:
        """Cached tokens that running requests use."""
        return self.cache.cached_tokens - self.cache.evictable_tokens

    @property
    def held_tokens(self) -> int:
        """Tokens owned by rows."""
        return self.capacity - self.allocator.free_tokens - self.cache.cached_tokens

    @property
    def available_tokens(self) -> int:
        return self.allocator.free_tokens + self.cache.evictable_tokens

    def peek(self, namespace: bytes, key: bytes) -> int:
        """How many tokens of `key` an `open` would find cached. Pure: nothing counts as used."""
        return self._match(namespace, key).length

    def touch(self, namespace: bytes, key: bytes) -> int:
        """As `peek`, but what is found counts as used just now."""
        match = self._match(namespace, key)
        self.cache.touch(match)
        return match.length

    def fits(self, namespace: bytes, key: bytes, length: int, reserve: int = 0) -> bool:
        """Whether an `open` would find the slots, if a row is free. Pure."""
        return self._fits(self._match(namespace, key), length, reserve)

    def open(self, namespace: bytes, key: bytes, length: int, reserve: int = 0) -> Tenancy | None:
        """Gives a request a row, the cached prefix of `key`, and slots for all positions below `length`.

        `key` holds the tokens that may match: all but the last, if one is to be computed. None, with nothing changed,
        if no row is free or if fewer than `reserve` tokens would then be available.
        """
        match = self._match(namespace, key)
        if not self.pool.free_rows or not self._fits(match, length, reserve):
            return None
        revived = self.cache.tokens_to_lock(match)
        node = self.cache.acquire(namespace, match)
        row = self.pool.alloc()
        if match.resident < match.length:
            self.cache.restore(match.path, self._take((match.length - match.resident) // self.page_size))
        position = 0
        for found in match.path:
            self.table[row, position : position + len(found.slots)] = found.slots
            position += len(found.slots)
        restored = match.length - match.resident
        tenancy = Tenancy(row, namespace, match.length, match.length, node, match.length, revived, restored)
        self.tenancies[row] = tenancy
        self.grow(tenancy, length)
        return tenancy

    def trunks(self, tenancies: list[Tenancy], least: int) -> list[Trunk]:
        """Which of these, by index, are best read together, their rows having the same slots; see `radix.trunks`. Pure.

        Nothing but a tenancy's own `open`, `adopt` and `share` changes the answer.
        """
        return trunks([tenancy.node for tenancy in tenancies], least) if self._cache_enabled else []

    def pages_to_grow(self, tenancy: Tenancy, length: int) -> int:
        """How many pages `grow` will take. Pure."""
        missing = length - tenancy.allocated
        return -(-missing // self.page_size) if missing > 0 else 0

    def grow(self, tenancy: Tenancy, length: int) -> None:
        """Gives the row slots for all positions below `length`, evicting others' if need be."""
        pages = self.pages_to_grow(tenancy, length)
        if pages:
            end = tenancy.allocated + pages * self.page_size
            assert end <= self.table.shape[1], "longer than a row"
            self.table[tenancy.row, tenancy.allocated : end] = self._take(pages)
            tenancy.allocated = end

    def shrink(self, tenancy: Tenancy, length: int) -> None:
        """Takes back the pages that hold no position below `length`. They must be the row's own."""
        end = self._whole_pages(length)
        assert end >= tenancy.shared, "shared pages"
        if end < tenancy.allocated:
            self.allocator.free(self.table[tenancy.row, end : tenancy.allocated])
            tenancy.allocated = end

    def grow_all(self, tenancies: list[Tenancy], lengths: list[int]) -> None:
        """`grow` for a whole step: the rows that need one page, as in decoding, get theirs in a single allocation."""
        page_size = self.page_size
        width = self.table.shape[1]
        entries = []  # where each new page begins in the flattened table
        for tenancy, length in zip(tenancies, lengths, strict=True):
            allocated = tenancy.allocated
            if length > allocated + page_size:
                self.grow(tenancy, length)
            elif length > allocated:
                assert allocated < width, "longer than a row"
                entries.append(tenancy.row * width + allocated)
                tenancy.allocated = allocated + page_size
        if entries:
            self._table_pages[np.array(entries) // page_size] = self._take(len(entries)).reshape(-1, page_size)

    def share(self, tenancy: Tenancy, key: bytes) -> int:
        """Hands the whole pages of `key`, the tokens whose K/V is computed by now, to the tree, and locks them there.

        Where the tree has the tokens already, the row's own slots are freed and its table entries become the tree's.
        Returns the first position whose entry changed, the number of tokens in `key` if none did.
        """
        unchanged = len(key) // TOKEN_BYTES
        start, end = tenancy.shared, unchanged // self.page_size * self.page_size
        if not self._cache_enabled or end <= start:
            return unchanged
        assert end <= tenancy.allocated, "computed tokens without slots"
        line = self.table[tenancy.row]
        tenancy.node, duplicates = self.cache.insert(tenancy.node, key[: end * TOKEN_BYTES], start, line[start:end])
        tenancy.shared = end
        return self._replace(tenancy, start, duplicates) if duplicates else unchanged

    def adopt(self, tenancy: Tenancy, key: bytes) -> int:
        """Takes over what the tree has of `key` by now beyond the row's shared tokens, as `share` does with duplicates.

        Returns the first position whose entry changed, the number of tokens in `key` if none did.
        """
        start = tenancy.shared
        assert len(key) <= tenancy.allocated * TOKEN_BYTES, "tokens without slots"
        if self._cache_enabled:
            tenancy.node, found = self.cache.descend(tenancy.node, key, start)
            if found:
                tenancy.shared = start + sum(map(len, found))
                return self._replace(tenancy, start, found)
        return len(key) // TOKEN_BYTES

    def close(self, tenancy: Tenancy, key: bytes | None) -> None:
        """Ends a tenancy. `key` holds the computed tokens to cache first; None caches nothing more."""
        assert self.tenancies[tenancy.row] is tenancy, "not open"
        if key is not None:
            self.share(tenancy, key)
        if tenancy.shared < tenancy.allocated:
            self.allocator.free(self.table[tenancy.row, tenancy.shared : tenancy.allocated])
        self.cache.release(tenancy.node)
        self.tenancies[tenancy.row] = None
        self.pool.free(tenancy.row)

    def take_copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """What the step that is being planned must copy before it computes, as the fields of the plan's `Copies`."""
        return None if self.host is None else self.host.take_copies()

    def flush(self) -> None:
        """Forgets everything cached. No tenancy may be open."""
        assert self.free_rows == len(self.tenancies), "a tenancy is open"
        self.allocator.free(self.cache.clear())

    def _match(self, namespace: bytes, key: bytes) -> Match:
        return self.cache.match(namespace, key) if self._cache_enabled else Match([], 0, 0, 0)

    def _fits(self, match: Match, length: int, reserve: int) -> bool:
        missing = max(match.length, self._whole_pages(length)) - match.resident
        return missing + reserve <= self.available_tokens - self.cache.tokens_to_lock(match)

    def _replace(self, tenancy: Tenancy, start: int, found: list[np.ndarray]) -> int:
        """Frees the row's own slots from `start` on for those the tree has; returns `start`."""
        slots = np.concatenate(found)
        line = self.table[tenancy.row, start : start + len(slots)]
        self.allocator.free(line)
        line[:] = slots
        return start

    def _take(self, pages: int) -> np.ndarray:
        """Slots of `pages` pages, after evicting what is missing."""
        short = pages - self.allocator.free_pages
        if short > 0:
            evicted = self.cache.evict(short * self.page_size)
            self.allocator.free(evicted)
            self.evicted_total += len(evicted)
        return self.allocator.alloc(pages)

    def _whole_pages(self, length: int) -> int:
        """`length` rounded up to pages, in tokens."""
        return -(-length // self.page_size) * self.page_size
