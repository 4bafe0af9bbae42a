"""L3, each rank: which running requests read the same cached prefix. Owns nothing; it reads the tree."""

from __future__ import annotations

from typing import NamedTuple

from radix.tree import Node


class Trunk(NamedTuple):
    """Read once for all its members, it saves `(len(members) - 1) * tokens` reads of a token's K/V."""

    tokens: int  # from the first on
    members: list[int]  # in ascending order


def trunks(ends: list[Node], least: int) -> list[Trunk]:
    """Groups paths that end in the locked nodes `ends`, by index, each path in at most one trunk.

    A node becomes a trunk where reading its prefix once more saves at least `least` tokens, for those below it, over
    the trunk above: so a short head that all have in common does not keep a few from sharing a long one.
    """
    places: dict[Node, int] = {}  # of the nodes that several paths have, parents first
    parents, depths, counts, last = [], [], [], []
    for node in ends:
        while node.lock_ref == 1 and node.parent is not None:
            node = node.parent
        path = []
        while node is not None and node not in places:
            path.append(node)
            node = node.parent
        place = -1 if node is None else places[node]
        for node in reversed(path):
            parents.append(place)
            depths.append(0 if place < 0 else depths[place] + len(node.slots))
            counts.append(0)
            places[node] = place = len(places)
        counts[place] += 1
        last.append(place)
    # Where all go on to one child, the child is the better trunk.
    forks = [True] * len(places)
    for place in range(len(places) - 1, -1, -1):
        parent = parents[place]
        if parent >= 0:
            counts[parent] += counts[place]
    for place, parent in enumerate(parents):
        if parent >= 0 and counts[place] == counts[parent]:
            forks[parent] = False
    trunk = list(range(len(places)))
    for place, parent in enumerate(parents):
        if parent >= 0:
            above, depth = trunk[parent], depths[place]
            saved = counts[place] * (depth - depths[above]) - depth
            if not forks[place] or saved < least:
                trunk[place] = above
    members: dict[int, list[int]] = {}
    for index, place in enumerate(last):
        members.setdefault(trunk[place], []).append(index)
    found = [Trunk(depths[place], indices) for place, indices in members.items()]
    return [each for each in found if (len(each.members) - 1) * each.tokens >= least]
