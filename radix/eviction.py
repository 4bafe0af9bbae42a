"""L3, each rank: in which order cached nodes are given up. Owns the serial numbers that stand for time.

A node enters when its last tenancy leaves and goes out when one comes. Releasing a path goes from the leaf to the root,
so a child is always older than its parent, and the oldest node of all is always a leaf. That is why this is a plain
queue: no search for leaves, no heap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from radix.tree import Node


class EvictionOrder:
    """The unlocked nodes, least recently used first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._serial = 0
        self._nodes: OrderedDict[int, Node] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Serial and node, oldest first."""
        return iter(self._nodes.items())

    def add(self, node: Node) -> None:
        self._serial += 1
        node.serial = self._serial
        self._nodes[self._serial] = node

    def discard(self, node: Node) -> None:
        """Takes a node out; one that has just been split off is not in yet."""
        self._nodes.pop(node.serial, None)

    def replace(self, node: Node, successor: Node) -> None:
        """`successor` takes the node's place."""
        successor.serial = node.serial
        self._nodes[node.serial] = successor

    def clear(self) -> None:
        self._nodes.clear()

    def first(self) -> Node | None:
        """The oldest, if there is one."""
        return next(iter(self._nodes.values()), None)
