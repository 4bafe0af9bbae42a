"""A ledger beside a brute-force model that knows no tree: each operation is done on both and everything compared.

The model keeps one dict entry per cached page, keyed by all tokens up to its end, and finds matches, locks and victims
by scanning. It does not predict which free page is handed out; it checks that the page was free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix import Ledger, Tenancy, check_ledger


def to_key(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def cached_pages(ledger: Ledger, on_host: bool = False) -> dict[tuple[bytes, bytes], tuple[int, ...]]:
    """The slots of every page cached in one memory, keyed by namespace and all token bytes up to its end."""
    pages = {}
    stack = [(namespace, b"", root) for namespace, root in ledger.cache.roots.items()]
    size = ledger.page_size
    while stack:
        namespace, prefix, node = stack.pop()
        for child in node.children.values():
            key = prefix + child.key
            for start in range(0, len(child.slots), size):
                end = len(prefix) + (start + size) * 4
                if child.on_host == on_host:
                    pages[namespace, key[:end]] = tuple(child.slots[start : start + size].tolist())
            stack.append((namespace, key, child))
    return pages


@dataclass(eq=False)
class Request:
    tenancy: Tenancy
    namespace: bytes
    tokens: tuple[int, ...]
    shared: int
    computed: int
    own: list[tuple[int, ...]]  # pages of slots behind the shared ones


class Harness:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        context_length: int,
        cache_enabled: bool = True,
        host_pages: int = 0,
        restore_least: int = 1,
    ):
        self.ledger = Ledger(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            context_length=context_length,
            cache_enabled=cache_enabled,
            host_pages=host_pages,
            restore_least=restore_least,
        )
        self.host_capacity, self.restore_least = host_pages * page_size, restore_least
        self.on_host: dict[tuple[bytes, bytes], int] = {}  # cached pages in host memory, and when they came there
        self.host_memory: dict[int, tuple[bytes, bytes]] = {}
        self.restored = 0
        self.page_size, self.num_rows, self.context_length = page_size, num_rows, context_length
        self.cache_enabled = cache_enabled
        self.free = [tuple(range(p * page_size, (p + 1) * page_size)) for p in range(1, num_pages + 1)]
        self.cached: dict[tuple[bytes, bytes], tuple[int, ...]] = {}
        self.released: dict[tuple[bytes, bytes], int] = {}  # when the last tenancy of a cached page left
        self.clock = 0
        self.evicted = 0
        self.requests: list[Request] = []
        self.memory: dict[int, tuple[bytes, bytes]] = {}  # what the last write put into a slot

    # What the model says

    def resident(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        return self.found(namespace, tokens, 0, self.cached)

    def matched(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        resident = self.resident(namespace, tokens)
        length = self.found(namespace, tokens, resident, self.on_host)
        return length if length - resident >= self.restore_least else resident

    def found(self, namespace: bytes, tokens: tuple[int, ...], end: int, pages: dict) -> int:
        key = to_key(tokens)
        while end + self.page_size <= len(tokens) and (namespace, key[: (end + self.page_size) * 4]) in pages:
            end += self.page_size
        return end

    def heads(self, namespace: bytes, tokens: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
        """The names of all whole pages of `tokens`."""
        key = to_key(tokens)
        return [(namespace, key[: end * 4]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def locked(self) -> list[tuple[bytes, bytes]]:
        return [
            page
            for request in self.requests
            for page in self.heads(request.namespace, request.tokens[: request.shared])
        ]

    def evictable(self) -> list[tuple[bytes, bytes]]:
        locked = dict.fromkeys(self.locked())
        return [page for page in self.cached if page not in locked]

    def pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def evict(self, num_pages: int) -> None:
        """The least recently used page that no cached page continues goes first."""
        for _ in range(num_pages):
            continued = {(namespace, key[: -4 * self.page_size]) for namespace, key in self.cached}
            leaves = [page for page in self.evictable() if page not in continued]
            victim = min(leaves, key=lambda page: (self.released[page], -len(page[1])))
            self.free.append(self.cached.pop(victim))
            del self.released[victim]
            if self.host_capacity:
                self.clock += 1
                self.on_host[victim] = self.clock

    def make_room(self, num_pages: int) -> None:
        """Follows the ledger's evictions: what was missing, or at most a part of a leaf more, or of two."""
        evicted = self.ledger.evicted_total - self.evicted
        self.evicted = self.ledger.evicted_total
        missing = max(0, num_pages - len(self.free)) * self.page_size
        assert missing <= evicted
        assert evicted % self.page_size == 0
        part = self.context_length // 2 if self.host_capacity else self.context_length // 16
        assert evicted == missing or (missing and evicted - missing <= self.pages(part) * self.page_size)
        self.evict(evicted // self.page_size)
        if self.host_capacity:
            self.forget()

    def forget(self) -> None:
        """Follows what the ledger forgets of host memory, the oldest first; it fills it before."""
        host = self.ledger.host
        forgotten = len(self.on_host) - host.cached_tokens // self.page_size
        spare = host.capacity - host.cached_tokens - len(host.leaving_slots)
        assert forgotten == 0 or spare <= max(self.context_length, self.page_size)
        for page in sorted(self.on_host, key=lambda page: (self.on_host[page], -len(page[1])))[:forgotten]:
            del self.on_host[page]

    def take(self, request: Request, num_pages: int) -> None:
        """Reads from the table which pages the row got, and checks that they were free."""
        start = request.shared + len(request.own) * self.page_size
        for i in range(num_pages):
            entries = self.ledger.table[request.tenancy.row, start + i * self.page_size :][: self.page_size]
            page = tuple(entries.tolist())
            self.free.remove(page)
            request.own.append(page)

    # Operations

    def open(self, namespace: bytes, tokens: tuple[int, ...], length: int, reserve: int = 0) -> Request | None:
        key_tokens = tokens[:-1]
        matched = self.matched(namespace, key_tokens)
        assert self.ledger.peek(namespace, to_key(key_tokens)) == matched
        resident = min(matched, self.resident(namespace, key_tokens))
        restored = (matched - resident) // self.page_size
        missing = max(0, self.pages(length) - matched // self.page_size) + restored
        heads = self.heads(namespace, tokens[:matched])
        idle = self.evictable()
        evictable = [page for page in idle if page not in heads]
        fits = missing * self.page_size + reserve <= (len(self.free) + len(evictable)) * self.page_size
        assert self.ledger.fits(namespace, to_key(key_tokens), length, reserve) == fits
        before = cached_pages(self.ledger)
        tenancy = self.ledger.open(namespace, to_key(key_tokens), length, reserve)
        assert (tenancy is not None) == (fits and len(self.requests) < self.num_rows)
        if tenancy is None:
            assert cached_pages(self.ledger) == before
            self.check()
            return None
        assert (tenancy.cached_tokens, tenancy.shared, tenancy.namespace) == (matched, matched, namespace)
        assert tenancy.revived == sum(page in idle for page in heads) * self.page_size
        assert tenancy.restored == matched - resident
        self.restored += tenancy.restored
        request = Request(tenancy, namespace, tokens, matched, matched, [])
        self.requests.append(request)
        for page in heads[resident // self.page_size :]:
            del self.on_host[page]
        self.make_room(missing)
        for page in heads[resident // self.page_size :]:
            start = len(page[1]) // 4 - self.page_size
            self.cached[page] = tuple(self.ledger.table[tenancy.row, start : start + self.page_size].tolist())
            self.free.remove(self.cached[page])
        self.take(request, missing - restored)
        self.check()
        return request

    def grow(self, growing: list[Request], lengths: list[int], together: bool) -> None:
        """Grows requests that fit; those that do not are left as they are."""
        chosen, targets, total = [], [], 0
        for request, length in zip(growing, lengths, strict=True):
            pages = max(0, self.pages(length) - request.shared // self.page_size - len(request.own))
            assert self.ledger.pages_to_grow(request.tenancy, length) == pages
            if (total + pages) * self.page_size <= self.ledger.available_tokens:
                total += pages
                chosen.append((request, pages))
                targets.append(length)
        if together:
            self.ledger.grow_all([request.tenancy for request, _ in chosen], targets)
            self.make_room(total)
        for (request, pages), length in zip(chosen, targets, strict=True):
            if not together:
                self.ledger.grow(request.tenancy, length)
                self.make_room(pages)
            self.take(request, pages)
        self.check()

    def compute(self, request: Request, end: int) -> None:
        """Writes the K/V of positions up to `end` (as far as there are tokens and slots) through the table."""
        end = min(end, len(request.tokens), request.tenancy.allocated)
        key = to_key(request.tokens)
        self.step()
        for position in range(request.computed, end):
            slot = int(self.ledger.table[request.tenancy.row, position])
            self.memory[slot] = (request.namespace, key[: position * 4 + 4])
        request.computed = max(request.computed, end)
        self.check()

    def insert(self, request: Request, end: int) -> int:
        """What sharing `tokens[:end]` must do to the model; the first position whose slot changes."""
        size, changed = self.page_size, end
        if not self.cache_enabled:
            return end
        while request.shared + size <= end:
            name = (request.namespace, to_key(request.tokens[: request.shared + size]))
            page = request.own.pop(0)
            if name in self.cached:
                changed = min(changed, request.shared)
                self.free.append(page)
            else:
                self.cached[name] = page
                self.on_host.pop(name, None)
            request.shared += size
        return changed

    def share(self, request: Request, end: int) -> None:
        end = min(end, request.computed)
        row = self.ledger.table[request.tenancy.row]
        before = row[: request.tenancy.allocated].copy()
        expected = self.insert(request, end)
        result = self.ledger.share(request.tenancy, to_key(request.tokens[:end]))
        differs = np.flatnonzero(before != row[: len(before)])
        assert result == expected == (differs[0] if len(differs) else end)
        self.check()

    def adopt(self, request: Request, end: int) -> None:
        size, tokens = self.page_size, request.tokens[: min(end, request.tenancy.allocated)]
        expected = len(tokens)
        for name in self.heads(request.namespace, tokens)[request.shared // size :]:
            if name not in self.cached:
                break
            expected = min(expected, request.shared)
            self.free.append(request.own.pop(0))
            request.shared += size
        request.computed = max(request.computed, request.shared)
        assert self.ledger.adopt(request.tenancy, to_key(tokens)) == expected
        self.check()

    def touch(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        """What is found in part counts as used in whole, as far as the tree has it in one node."""
        matched = self.matched(namespace, tokens)
        match = self.ledger.cache.match(namespace, to_key(tokens))
        assert self.ledger.touch(namespace, to_key(tokens)) == matched
        self.clock += 1
        key = b"".join(node.key for node in match.path)
        touched = [(namespace, key[: end * 4]) for end in range(self.page_size, len(key) // 4 + 1, self.page_size)]
        locked = dict.fromkeys(self.locked())
        for page in touched:
            if page not in locked:
                (self.on_host if page in self.on_host else self.released)[page] = self.clock
        self.check()

    def close(self, request: Request, end: int | None) -> None:
        if end is not None:
            end = min(end, request.computed)
            self.insert(request, end)
        self.ledger.close(request.tenancy, None if end is None else to_key(request.tokens[:end]))
        self.free += request.own
        self.requests.remove(request)
        self.clock += 1
        locked = dict.fromkeys(self.locked())
        for page in self.heads(request.namespace, request.tokens[: request.shared]):
            if page not in locked:
                self.released[page] = self.clock
        self.check()

    def flush(self) -> None:
        for request in list(self.requests):
            self.close(request, None)
        self.ledger.flush()
        self.free += self.cached.values()
        self.cached, self.released, self.on_host = {}, {}, {}
        self.check()

    def step(self) -> None:
        """Does what the ledger has asked for: saves before loads, and each as if all at once."""
        copies = self.ledger.take_copies()
        if copies is None:
            return
        saved_from, saved_to, loaded_from, loaded_to = (slots.tolist() for slots in copies)
        assert len({*saved_to}) == len(saved_to)
        assert len({*loaded_to}) == len(loaded_to)
        saved = [self.memory[slot] for slot in saved_from]
        self.host_memory.update(zip(saved_to, saved, strict=True))
        loaded = [self.host_memory[slot] for slot in loaded_from]
        self.memory.update(zip(loaded_to, loaded, strict=True))
        self.check()

    # Comparison

    def check(self) -> None:
        ledger = self.ledger
        check_ledger(ledger)
        assert cached_pages(ledger) == self.cached
        assert cached_pages(ledger, on_host=True).keys() == self.on_host.keys()
        size = self.page_size
        assert sorted(ledger.allocator.free_slots.reshape(-1, size).tolist()) == sorted(map(list, self.free))
        assert ledger.free_tokens == len(self.free) * size
        assert ledger.cached_tokens == len(self.cached) * size
        assert ledger.evictable_tokens == len(self.evictable()) * size
        assert ledger.locked_tokens == ledger.cached_tokens - ledger.evictable_tokens
        assert ledger.held_tokens == sum(len(request.own) for request in self.requests) * size
        assert ledger.available_tokens == ledger.free_tokens + ledger.evictable_tokens
        assert ledger.free_rows == self.num_rows - len(self.requests)
        assert ledger.evicted_total == self.evicted
        pending = ledger.host is not None and (ledger.host._saves or ledger.host._loads)
        for request in self.requests:
            tenancy = request.tenancy
            assert (tenancy.shared, tenancy.allocated) == (request.shared, request.shared + len(request.own) * size)
            row = ledger.table[tenancy.row, : request.computed].tolist()
            key = to_key(request.tokens)
            for position, slot in enumerate(row if not pending else ()):
                expected = (request.namespace, key[: position * 4 + 4])
                assert self.memory[slot] == expected, f"position {position} of row {tenancy.row} reads another prefix"
