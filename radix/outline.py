"""L3, each rank: the shape of the tree, for people who look at it. Pure; decides nothing."""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import NamedTuple

from radix.ledger import Ledger
from radix.tree import TOKEN_BYTES


class NodeOutline(NamedTuple):
    parent: int  # its place in the outline; -1 below a root
    tokens: int
    lock_ref: int  # running requests that use it
    serial: int  # the larger, the later the last of them left; 0 if none has left yet
    ids: bytes  # int32, of its first tokens


def outline(ledger: Ledger, most_nodes: int, most_tokens: int) -> list[NodeOutline]:
    """Of all namespaces, the nodes nearest to the roots, parents before children. `most_tokens` bounds `ids`."""
    nodes: list[NodeOutline] = []
    roots = ledger.cache.roots.values()
    waiting = deque([(-1, chain.from_iterable(root.children.values() for root in roots))])
    while waiting:
        parent, children = waiting.popleft()
        # A node may have far more of them than anybody wants to see, and the engine stands still meanwhile.
        for node in islice(children, most_nodes - len(nodes)):
            if node.children:
                waiting.append((len(nodes), node.children.values()))
            ids = node.key[: most_tokens * TOKEN_BYTES]
            nodes.append(NodeOutline(parent, len(node.slots), node.lock_ref, node.serial, ids))
    return nodes
