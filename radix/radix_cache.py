"""L3, each rank: the prefix cache. Owns the tree of every namespace, the lock counts, and the count of cached tokens.

Whatever enters the tree is locked by the tenancy that brings it, and becomes evictable when its last tenancy leaves.
Pages enter through `_store` and leave through `_remove` or all at once through `clear`, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from radix.eviction import EvictionOrder
from radix.tree import NO_SLOTS, TOKEN_BYTES, Node, split, walk


class Match(NamedTuple):
    """The part of a key that is cached. Valid until the tree changes."""

    path: list[Node]  # from below the root; the last may agree only in part
    length: int  # tokens, a multiple of the page size
    overhang: int  # bytes of the last node's key beyond the match


class PageObserver(Protocol):
    """Hears of every page that enters the tree or leaves it, in order; it must decide nothing."""

    def stored(self, parent: Node, key: bytes, slots: np.ndarray) -> None:
        """The tokens `key`, whole pages that lie in `slots`, continue `parent`."""

    def removed(self, slots: np.ndarray) -> None:
        """The pages in `slots`, in the order of their tokens; no page continues the last one."""

    def cleared(self) -> None:
        """All that was stored is gone."""


class RadixCache:
    def __init__(self, page_size: int, observer: PageObserver | None = None) -> None:
        self.roots: dict[bytes, Node] = {}  # by namespace; one that has neither children nor tenancies is removed
        self.order = EvictionOrder()
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._observer = observer

    def match(self, namespace: bytes, key: bytes) -> Match:
        """The longest cached prefix of `key`. Pure."""
        root = self.roots.get(namespace)
        if root is None:
            return Match([], 0, 0)
        path, position, overhang = walk(root, key, 0, self._page_bytes)
        return Match(path, position // TOKEN_BYTES, overhang)

    def tokens_to_lock(self, match: Match) -> int:
        """How many tokens `acquire` makes unevictable. Pure."""
        unlocked = [len(node.key) for node in match.path if node.lock_ref == 0]
        # A locked node has no unlocked parent: if any node is unlocked, the last one is.
        return (sum(unlocked) - match.overhang) // TOKEN_BYTES if unlocked else 0

    def touch(self, match: Match) -> None:
        """The unlocked nodes of a match become the youngest."""
        for node in reversed(match.path):
            if node.lock_ref == 0:
                self.order.discard(node)
                self.order.add(node)

    def acquire(self, namespace: bytes, match: Match) -> Node:
        """Locks a match and returns its deepest node, the root if nothing matched. `match.path` becomes exact."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, NO_SLOTS, None)
        root.lock_ref += 1
        self._lock(match.path, match.overhang)
        return match.path[-1] if match.path else root

    def descend(self, node: Node, key: bytes, start: int) -> tuple[Node, list[np.ndarray]]:
        """Moves the lock of the locked `node`, which ends at token `start` of `key`, down to what is cached behind it.

        Returns the deepest node and the slots of the tokens found, whole pages of them.
        """
        path, _, overhang = walk(node, key, start * TOKEN_BYTES, self._page_bytes)
        self._lock(path, overhang)
        return (path[-1] if path else node), [found.slots for found in path]

    def insert(self, node: Node, key: bytes, start: int, slots: np.ndarray) -> tuple[Node, list[np.ndarray]]:
        """Caches what follows the locked `node`, which ends at token `start` of `key`, and moves the lock down to it.

        `slots` holds those of the tokens from `start` on, whole pages of them, and `key` ends with the last. Returns
        the deepest node, and the slots of the tokens that were here already: as many of the caller's were not taken.
        """
        node, duplicates = self.descend(node, key, start)
        taken = sum(map(len, duplicates))
        if taken < len(slots):
            node = self._store(node, key[(start + taken) * TOKEN_BYTES :], slots[taken:].copy())
            node.lock_ref = 1
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
        of it, so that copying what stays costs O(evicted).
        """
        assert num_tokens <= self.evictable_tokens, "more tokens than are evictable"
        evicted = []
        while num_tokens > 0:
            leaf = self.order.oldest()
            size = len(leaf.slots)
            part = -(-(size // 16) // self._page_size) * self._page_size
            drop = min(size, max(num_tokens, part))
            evicted.append(self._remove(leaf, size - drop))
            num_tokens -= drop
        return np.concatenate(evicted) if evicted else NO_SLOTS

    def clear(self) -> np.ndarray:
        """Gives up everything, of which nothing may be locked, and returns its slots."""
        slots = [node.slots for _, node in self.order]
        assert self.evictable_tokens == self.cached_tokens, "a node is locked"
        self.roots.clear()
        self.order.clear()
        self.cached_tokens = self.evictable_tokens = 0
        if self._observer is not None:
            self._observer.cleared()
        return np.concatenate([NO_SLOTS, *slots])

    def _lock(self, path: list[Node], overhang: int) -> None:
        """Locks each node of a downward path, up to the `overhang` bytes of the last, which are split off."""
        if overhang:
            path[-1] = split(path[-1], len(path[-1].key) - overhang, self._page_bytes)
        for node in path:
            if node.lock_ref == 0:
                self.order.discard(node)
                self.evictable_tokens -= len(node.slots)
            node.lock_ref += 1

    def _store(self, parent: Node, key: bytes, slots: np.ndarray) -> Node:
        """New pages enter the tree, as a leaf below `parent`."""
        node = parent.children[key[: self._page_bytes]] = Node(key, slots, parent)
        self.cached_tokens += len(slots)
        if self._observer is not None:
            self._observer.stored(parent, key, slots)
        return node

    def _remove(self, leaf: Node, keep: int) -> np.ndarray:
        """The pages of an unlocked leaf behind its first `keep` tokens leave the tree. Returns their slots."""
        assert not leaf.children, "only leaves are evicted"
        slots = leaf.slots[keep:]
        if self._observer is not None:
            self._observer.removed(slots)
        self.cached_tokens -= len(slots)
        self.evictable_tokens -= len(slots)
        if keep:
            leaf.key, leaf.slots = leaf.key[: keep * TOKEN_BYTES], leaf.slots[:keep].copy()
        else:
            self.order.discard(leaf)
            del leaf.parent.children[leaf.key[: self._page_bytes]]
            if leaf.parent.parent is None:
                self._drop_empty_root(leaf.parent)
        return slots

    def _drop_empty_root(self, root: Node) -> None:
        if root.lock_ref == 0 and not root.children:
            del self.roots[root.key]
