"""L3, each rank: the nodes of the radix tree and the comparison of their keys. Owns no state beyond the nodes.

A key is a run of int32 token ids as little-endian bytes. All lengths and offsets in this module are bytes of a key, and
multiples of `page_bytes` wherever a key is cut, so that a page is never shared by two nodes.
"""

from __future__ import annotations

import numpy as np

TOKEN_BYTES = 4
NO_SLOTS = np.empty(0, np.int32)


class Node:
    """An edge of the tree and what it leads to: the tokens `key` behind all of the parent's, and where their K/V lives.

    `children` is keyed by the bytes of a child's first page. `lock_ref` counts the tenancies whose path runs through
    the node. `serial` says when the last of them left; it is unique, and 0 if none has left yet. Slots are those of the
    pool, or of host memory if the node is `on_host`, as are then all below it. A root has no parent, no slots, and its
    namespace for a key.
    """

    __slots__ = ("children", "key", "lock_ref", "on_host", "parent", "serial", "slots")

    def __init__(self, key: bytes, slots: np.ndarray, parent: Node | None) -> None:
        self.key = key
        self.slots = slots  # int32 [len(key) / TOKEN_BYTES]
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.serial = 0
        self.on_host = False


def common_length(a: bytes, b: bytes, start: int, unit: int) -> int:
    """In how many bytes, a multiple of `unit`, `a` agrees with `b[start:]`. Binary search, halves compared as bytes."""
    low, high = 0, min(len(a), len(b) - start) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if b.startswith(a[low * unit : middle * unit], start + low * unit):
            low = middle
        else:
            high = middle - 1
    return low * unit


def walk(node: Node, key: bytes, start: int, page_bytes: int) -> tuple[list[Node], int, int]:
    """Follows the whole pages of `key[start:]` below `node`.

    Returns the nodes entered, how far in `key` they agree with it, and how much of the last one lies beyond that.
    """
    path = []
    position, end = start, len(key) - page_bytes
    while position <= end:
        child = node.children.get(key[position : position + page_bytes])
        if child is None:
            break
        path.append(child)
        if not key.startswith(child.key, position):
            common = common_length(child.key, key, position, page_bytes)
            return path, position + common, len(child.key) - common
        position += len(child.key)
        node = child
    return path, position, 0


def split(node: Node, at: int, page_bytes: int) -> Node:
    """Puts a new node with the first `at` bytes of `node` in its place, `node` below it, and returns the new one.

    `node` itself stays the lower part: a tenancy that holds it goes on holding the same tokens.
    """
    upper = Node(node.key[:at], node.slots[: at // TOKEN_BYTES].copy(), node.parent)
    upper.lock_ref = node.lock_ref
    upper.on_host = node.on_host
    upper.children[node.key[at : at + page_bytes]] = node
    node.parent.children[node.key[:page_bytes]] = upper
    # Copies on both sides, or a few tokens would keep the memory of a long prompt's slots alive.
    node.key, node.slots, node.parent = node.key[at:], node.slots[at // TOKEN_BYTES :].copy(), upper
    return upper
