"""L3, each rank: the prefix cache. Owns the tree of every namespace, the lock counts, and the count of cached tokens.

Whatever enters the tree is locked by the tenancy that brings it, and becomes evictable when its last tenancy leaves.
Pages enter through `_store`, leave through `_cut` or all at once through `clear`, and move to host memory in `_evict`
and back in `_to_pool`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from radix.eviction import EvictionOrder
from radix.host_tier import HostTier
from radix.tree import NO_SLOTS, TOKEN_BYTES, Node, split, walk


class Match(NamedTuple):
    """The part of a key that is cached. Valid until the tree changes."""

    path: list[Node]  # from below the root; the last may agree only in part
    length: int  # tokens, a multiple of the page size
    resident: int  # of these, those in the pool: the first ones
    overhang: int  # bytes of the last node's key beyond the match


class PageObserver(Protocol):
    """Hears of every page that enters the tree or leaves it, in order; it must decide nothing."""

    def stored(self, parent: Node, key: bytes, slots: np.ndarray) -> None:
        """The tokens `key`, whole pages that lie in `slots`, continue `parent`."""

    def moved(self, slots: np.ndarray, target: np.ndarray, to_host: bool) -> None:
        """The pages in `slots` lie in `target` from now on: of the pool and of host memory, or the other way round."""

    def removed(self, slots: np.ndarray, on_host: bool) -> None:
        """The pages in `slots`, in the order of their tokens; no page continues the last one."""

    def cleared(self) -> None:
        """All that was stored is gone."""


class RadixCache:
    """`cached_tokens` and `evictable_tokens` are those in the pool; what `host` has, if there is one, is its own."""

    def __init__(self, page_size: int, observer: PageObserver | None = None, host: HostTier | None = None) -> None:
        self.roots: dict[bytes, Node] = {}  # by namespace; one that has neither children nor tenancies is removed
        self.order = EvictionOrder()
        self.host = host
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._observer = observer

    def match(self, namespace: bytes, key: bytes) -> Match:
        """The longest cached prefix of `key`, with what host memory has of it if that is worth copying. Pure."""
        root = self.roots.get(namespace)
        if root is None:
            return Match([], 0, 0, 0)
        path, position, overhang = walk(root, key, 0, self._page_bytes)
        length = position // TOKEN_BYTES
        if not path or not path[-1].on_host:
            return Match(path, length, length, overhang)
        in_pool = _pool_part(path)
        resident = sum(len(node.slots) for node in in_pool)
        if length - resident < self.host.restore_least:
            return Match(in_pool, resident, resident, 0)
        return Match(path, length, resident, overhang)

    def tokens_to_lock(self, match: Match) -> int:
        """How many tokens `acquire` makes unevictable. Pure."""
        unlocked = [len(node.key) for node in match.path if node.lock_ref == 0]
        # A locked node has no unlocked parent: if any node is unlocked, the last one is.
        to_lock = (sum(unlocked) - match.overhang) // TOKEN_BYTES if unlocked else 0
        return to_lock - (match.length - match.resident)

    def touch(self, match: Match) -> None:
        """The unlocked nodes of a match become the youngest."""
        for node in reversed(match.path):
            if node.lock_ref == 0:
                order = self.host.order if node.on_host else self.order
                order.discard(node)
                order.add(node)

    def acquire(self, namespace: bytes, match: Match) -> Node:
        """Locks a match and returns its deepest node, the root if nothing matched. `match.path` becomes exact."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, NO_SLOTS, None)
        root.lock_ref += 1
        self._lock(match.path, match.overhang)
        return match.path[-1] if match.path else root

    def restore(self, path: list[Node], slots: np.ndarray) -> None:
        """What host memory has of a locked path moves to `slots`."""
        for node in path[len(_pool_part(path)) :]:
            size = len(node.slots)
            self._to_pool(node, slots[:size].copy(), self.host.load)
            slots = slots[size:]

    def descend(self, node: Node, key: bytes, start: int) -> tuple[Node, list[np.ndarray]]:
        """Moves the lock of the locked `node`, which ends at token `start` of `key`, down to what is cached behind it.

        Returns the deepest node and the slots of the tokens found, whole pages of them. All that is in the pool.
        """
        if not node.children:  # as behind every chunk of a prompt that nobody else brings
            return node, []
        path, _, overhang = walk(node, key, start * TOKEN_BYTES, self._page_bytes)
        if path and path[-1].on_host:
            path, overhang = _pool_part(path), 0
        self._lock(path, overhang)
        return (path[-1] if path else node), [found.slots for found in path]

    def insert(self, node: Node, key: bytes, start: int, slots: np.ndarray) -> tuple[Node, list[np.ndarray]]:
        """Caches what follows the locked `node`, which ends at token `start` of `key`, and moves the lock down to it.

        `slots` holds those of the tokens from `start` on, whole pages of them, and `key` ends with the last. Returns
        the deepest node, and the slots of the tokens that were here already: as many of the caller's were not taken.
        """
        node, duplicates = self.descend(node, key, start)
        taken = sum(map(len, duplicates))
        if taken < len(slots) and self.host is not None:
            node, replaced = self._replace(node, key, start + taken, slots[taken:])
            taken += replaced
        if taken < len(slots):
            node = self._store(node, key[(start + taken) * TOKEN_BYTES :], slots[taken:])
        return node, duplicates

    def release(self, node: Node) -> None:
        """Takes one lock off the path that ends in `node`."""
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.order.add(node)
                self.evictable_tokens += len(node.slots)
            node = node.parent
        node.lock_ref -= 1
        self._drop_empty_root(node)

    def evict(self, num_tokens: int) -> np.ndarray:
        """Gives up at least `num_tokens`, a multiple of the page size, and returns their slots, whole pages.

        The oldest leaf loses its tail, since the head of a prefix serves more requests; but no less than a sixteenth
        of it, so that copying what stays costs O(evicted). What finds room in host memory moves there: then no less
        than a quarter, or a prefix would come back in many pieces.
        """
        assert num_tokens <= self.evictable_tokens, "more tokens than are evictable"
        evicted = []
        while num_tokens > 0:
            leaf = self.order.first()
            drop = self._part(leaf, num_tokens, 16 if self.host is None else 4)
            evicted.append(self._evict(leaf, drop))
            num_tokens -= drop
        return evicted[0] if len(evicted) == 1 else np.concatenate([NO_SLOTS, *evicted])

    def clear(self) -> np.ndarray:
        """Gives up everything, of which nothing may be locked, and returns its slots."""
        slots = [node.slots for _, node in self.order]
        assert self.evictable_tokens == self.cached_tokens, "a node is locked"
        self.roots.clear()
        self.order.clear()
        self.cached_tokens = self.evictable_tokens = 0
        if self.host is not None:
            self.host.clear()
        if self._observer is not None:
            self._observer.cleared()
        return np.concatenate([NO_SLOTS, *slots])

    def _lock(self, path: list[Node], overhang: int) -> None:
        """Locks each node of a downward path, up to the `overhang` bytes of the last, which are split off."""
        if overhang:
            path[-1] = split(path[-1], len(path[-1].key) - overhang, self._page_bytes)
        for node in path:
            if node.lock_ref == 0:
                if node.on_host:
                    self.host.order.discard(node)
                else:
                    self.order.discard(node)
                    self.evictable_tokens -= len(node.slots)
            node.lock_ref += 1

    def _store(self, end: Node, key: bytes, slots: np.ndarray) -> Node:
        """New pages enter the tree behind all of the locked `end`; returns the node they are in, locked.

        A leaf that nobody else uses grows, so that a prompt computed in many pieces does not stay in pieces.
        """
        if self._observer is not None:
            self._observer.stored(end, key, slots)
        self.cached_tokens += len(slots)
        if end.lock_ref == 1 and not end.children and end.parent is not None:
            end.key += key
            end.slots = np.concatenate((end.slots, slots))
            return end
        node = end.children[key[: self._page_bytes]] = Node(key, slots.copy(), end)
        node.lock_ref = 1
        return node

    def _replace(self, node: Node, key: bytes, start: int, slots: np.ndarray) -> tuple[Node, int]:
        """As `insert`, for what is in host memory: it lies in the caller's slots from now on.

        Returns the deepest node, and how many slots were taken.
        """
        path, _, overhang = walk(node, key, start * TOKEN_BYTES, self._page_bytes)
        self._lock(path, overhang)
        taken = 0
        for node in path:
            end = taken + len(node.slots)
            self._to_pool(node, slots[taken:end].copy(), self.host.replace)
            taken = end
        return node, taken

    def _to_pool(self, node: Node, slots: np.ndarray, move: Callable[[Node, np.ndarray], None]) -> None:
        if self._observer is not None:
            self._observer.moved(node.slots, slots, to_host=False)
        move(node, slots)
        self.cached_tokens += len(slots)

    def _part(self, leaf: Node, num_tokens: int, parts: int) -> int:
        """How many of `num_tokens` a leaf gives up at a time: at least its `parts`-th part, if it has so many."""
        size = len(leaf.slots)
        least = -(-(size // parts) // self._page_size) * self._page_size
        return min(size, max(num_tokens, least))

    def _evict(self, node: Node, drop: int) -> np.ndarray:
        """The last `drop` tokens of the pool's oldest node leave the pool. Returns their slots.

        If host memory is too small for all of them their tail is forgotten, with all that was there.
        """
        slots = node.slots[len(node.slots) - drop :]
        self.cached_tokens -= drop
        self.evictable_tokens -= drop
        moved = 0 if self.host is None else min(drop, self.host.capacity)
        if not moved or not self._make_room(moved):
            self._cut(node, drop, self.order)
            return slots
        if moved < drop:
            self._cut(node, drop - moved, self.order)
        if moved < len(node.slots):
            upper = split(node, len(node.key) - moved * TOKEN_BYTES, self._page_bytes)
            self.order.replace(node, upper)
        else:
            self.order.discard(node)
        in_pool = node.slots
        self.host.save(node)
        if self._observer is not None:
            self._observer.moved(in_pool, node.slots, to_host=True)
        return slots

    def _make_room(self, num_tokens: int) -> bool:
        """Whether host memory has room for so many tokens, after giving up the oldest there if need be."""
        host = self.host
        while (missing := num_tokens - host.allocator.free_tokens) > 0 and (leaf := host.order.first()) is not None:
            drop = self._part(leaf, missing, 16)
            host.forget(leaf.slots[len(leaf.slots) - drop :])
            self._cut(leaf, drop, host.order)
        return missing <= 0

    def _cut(self, leaf: Node, drop: int, order: EvictionOrder) -> None:
        """The last `drop` tokens of an unlocked leaf leave the tree."""
        assert not leaf.children, "only leaves are given up"
        keep = len(leaf.slots) - drop
        if self._observer is not None:
            self._observer.removed(leaf.slots[keep:], leaf.on_host)
        if keep:
            leaf.key, leaf.slots = leaf.key[: keep * TOKEN_BYTES], leaf.slots[:keep].copy()
        else:
            order.discard(leaf)
            del leaf.parent.children[leaf.key[: self._page_bytes]]
            if leaf.parent.parent is None:
                self._drop_empty_root(leaf.parent)

    def _drop_empty_root(self, root: Node) -> None:
        if root.lock_ref == 0 and not root.children:
            del self.roots[root.key]


def _pool_part(path: list[Node]) -> list[Node]:
    """The head of a path whose last node is in host memory."""
    return [node for node in path if not node.on_host]
