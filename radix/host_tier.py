"""L3, each rank: the prefix cache's second tier, in host memory. Owns its slots, their order, and the copies to do.

Evicted prefixes move here, and back when they are found; a token's K/V lies in one of the two memories. Nothing here
waits for a copy or asks for its state: the books change when a step is planned, and the executor makes them true, in
the order of the steps.
"""

from __future__ import annotations

import numpy as np

from radix.allocator import TokenToKVPoolAllocator
from radix.eviction import EvictionOrder
from radix.tree import NO_SLOTS, Node


class HostTier:
    """`restore_least` is the least number of tokens that are copied back sooner than they are computed again."""

    def __init__(self, num_pages: int, page_size: int, restore_least: int) -> None:
        self.restore_least = restore_least
        self.capacity = num_pages * page_size
        self.allocator = TokenToKVPoolAllocator(num_pages, page_size)
        self.order = EvictionOrder()
        self.cached_tokens = 0
        self.saved_total = self.restored_total = 0  # tokens that came here, and that went back, since the start
        self._saves: list[tuple[np.ndarray, np.ndarray]] = []
        self._loads: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def leaving_slots(self) -> np.ndarray:
        """What the next step still reads: free once it is planned."""
        return _joined_pairs(self._loads)[0]

    def save(self, node: Node) -> None:
        """An unlocked node of the pool moves here, where there is room for it."""
        slots = self.allocator.alloc(len(node.slots) // self.allocator.page_size)
        self._saves.append((node.slots, slots))
        node.slots = slots
        node.on_host = True
        self.cached_tokens += len(slots)
        self.saved_total += len(slots)
        self.order.add(node)

    def load(self, node: Node, slots: np.ndarray) -> None:
        """A locked node moves to `slots` of the pool."""
        self._loads.append((node.slots, slots))
        self.restored_total += len(slots)
        self._leaves(node, slots)

    def replace(self, node: Node, slots: np.ndarray) -> None:
        """A locked node has been computed again: it lies in `slots` of the pool, and what is here is forgotten."""
        self.allocator.free(node.slots)
        self._leaves(node, slots)

    def forget(self, slots: np.ndarray) -> None:
        self.allocator.free(slots)
        self.cached_tokens -= len(slots)

    def clear(self) -> None:
        for _, node in self.order:
            self.allocator.free(node.slots)
        self.allocator.free(self.leaving_slots)
        self.order.clear()
        self.cached_tokens = 0
        self._saves.clear()
        self._loads.clear()

    def take_copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """What has been decided since the last call, for the step that is being planned, before it computes.

        From which slots of the pool to which of host memory, each of these but once; then, when all that is done, from
        which of host memory to which of the pool.
        """
        if not self._saves and not self._loads:
            return None
        saved_from, saved_to = _joined_pairs(self._saves)
        loaded_from, loaded_to = _joined_pairs(self._loads)
        self.allocator.free(loaded_from)
        # A slot that was given up in between and taken again gets what was saved there last.
        _, last = np.unique(saved_to[::-1], return_index=True)
        last = np.sort(len(saved_to) - 1 - last)
        self._saves.clear()
        self._loads.clear()
        return saved_from[last], saved_to[last], loaded_from, loaded_to

    def _leaves(self, node: Node, slots: np.ndarray) -> None:
        self.cached_tokens -= len(slots)
        node.slots = slots
        node.on_host = False


def _joined_pairs(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([NO_SLOTS, *(source for source, _ in pairs)]), np.concatenate(
        [NO_SLOTS, *(target for _, target in pairs)]
    )
