"""L3, each rank: the shape of the tree, for people who look at it. Pure; decides nothing."""

from __future__ import annotations

from collections import deque
from itertools import chain, islice

from radix.ledger import Ledger
from radix.tree import TOKEN_BYTES

NodeOutline = tuple[int, int, int, int, bytes]
"""Its parent's place in the outline, -1 below a root; its tokens; running requests that use it; a number that is the
larger, the later the last of them left, 0 if none has left yet; int32 ids of its first tokens."""


def outline(ledger: Ledger, most_nodes: int, most_tokens: int) -> list[NodeOutline]:
    """Of all namespaces, the nodes nearest to the roots, parents before children. `most_tokens` bounds the ids."""
    nodes: list[NodeOutline] = []
    roots = ledger.cache.roots.values()
    waiting = deque([(-1, chain.from_iterable(root.children.values() for root in roots))])
    while waiting:
        parent, children = waiting.popleft()
        # A node may have far more of them than anybody wants to see, and the engine stands still meanwhile.
        for node in islice(children, most_nodes - len(nodes)):
            if node.children:
                waiting.append((len(nodes), node.children.values()))
            key = node.key
            tokens, ids = len(key) // TOKEN_BYTES, key[: most_tokens * TOKEN_BYTES]
            nodes.append((parent, tokens, node.lock_ref, node.serial, ids))
    return nodes
