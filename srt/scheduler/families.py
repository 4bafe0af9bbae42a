"""L2, each rank: which of the waiting requests share the head of their prompts. Owns a tree of these prompts.

It is a tree of the radix cache's kind, without slots, of what is asked for instead of what is there.
"""

from __future__ import annotations

from collections import OrderedDict

from radix.tree import TOKEN_BYTES, walk
from srt.scheduler.request import Request


class Branch:
    """The tokens `key` behind all of the parent's, and the requests whose prompts run through them."""

    __slots__ = ("children", "key", "parent", "requests")

    def __init__(self, key: bytes, parent: Branch | None) -> None:
        self.key = key
        self.parent = parent  # kept by a branch that has left the tree
        self.children: dict[bytes, Branch] = {}  # by their first token
        self.requests: OrderedDict[int, Request] = OrderedDict()  # by serial, in the order they came here

    def oldest(self) -> Request:
        return next(iter(self.requests.values()))

    def inhabited(self) -> Branch:
        """The deepest branch on the way to the root through which a request runs; the root if there is none."""
        branch = self
        while not branch.requests and branch.parent is not None:
            branch = branch.parent
        return branch


class Families:
    """`root` stands for all requests; it has no tokens."""

    def __init__(self) -> None:
        self.root = Branch(b"", None)
        self._ends: dict[int, Branch] = {}  # where each request's prompt ends, by serial

    def add(self, request: Request) -> None:
        namespace = request.namespace  # shared by whole families, so it is as good as tokens before the first
        key = namespace + bytes(-len(namespace) % TOKEN_BYTES) + request.key(request.length)
        path, position, overhang = walk(self.root, key, 0, TOKEN_BYTES)
        if overhang:
            path[-1] = _split(path[-1], len(path[-1].key) - overhang)
        end = path[-1] if path else self.root
        if position < len(key):
            child = end.children[key[position : position + TOKEN_BYTES]] = Branch(key[position:], end)
            path.append(child)
            end = child
        self.root.requests[request.serial] = request
        for branch in path:
            branch.requests[request.serial] = request
        self._ends[request.serial] = end

    def remove(self, request: Request) -> Branch:
        """Returns the deepest branch on its way that other requests have in common with it."""
        end = branch = self._ends.pop(request.serial)
        while branch is not None:
            del branch.requests[request.serial]
            if not branch.requests and branch.parent is not None:
                del branch.parent.children[branch.key[:TOKEN_BYTES]]
            branch = branch.parent
        return end.inhabited()


def _split(branch: Branch, at: int) -> Branch:
    """Puts a new branch with the first `at` bytes of `branch` in its place, `branch` below it, and returns it."""
    upper = Branch(branch.key[:at], branch.parent)
    upper.requests = branch.requests.copy()
    upper.children[branch.key[at : at + TOKEN_BYTES]] = branch
    branch.parent.children[branch.key[:TOKEN_BYTES]] = upper
    branch.key, branch.parent = branch.key[at:], upper
    return upper
