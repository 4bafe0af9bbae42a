"""L5, leader: what enters and leaves the prefix cache, as events about blocks that routers understand.

A block is a page of the cache; its hash follows from all the tokens up to its end, so it is the same wherever the page
lies and however the tree's nodes are cut. `PageLog` listens in the scheduler's thread and only takes notes; hashing
and naming is `BlockEvents`' work, in the publisher's thread, which gets the notes in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from radix.tree import TOKEN_BYTES, Node
from srt.messages import Message, unpack_ids

MEDIUM = "GPU"
"""What vLLM calls the memory that the model itself reads, whatever the device."""


class Stored(Message, tag=1):
    parent: int  # the page that these continue; 0 where they begin a prompt
    namespace: bytes  # given where they begin a prompt
    key: bytes  # their tokens
    pages: bytes  # their numbers, int32


class Removed(Message, tag=2):
    pages: bytes


class Cleared(Message, tag=3):
    pass


class Moved(Message, tag=4):
    """Pages went from one memory to the other; what was known of `pages` is true of `targets`."""

    pages: bytes
    targets: bytes


Change = Stored | Removed | Cleared | Moved
"""Pages of the pool have positive numbers, those of host memory negative ones."""


class Changes(Message):
    """What one step did to the tree."""

    time: float  # seconds since 1970
    changes: list[Change]


class PageLog:
    """The tree's `PageObserver`. Gives a step's changes, encoded, to `send` if there are any."""

    def __init__(self, page_size: int, send: Callable[[bytes], None]) -> None:
        self._page_size = page_size
        self._send = send
        self._changes: list[Change] = []
        self._encoder = msgspec.msgpack.Encoder()

    def stored(self, parent: Node, key: bytes, slots: np.ndarray) -> None:
        if parent.parent is None:
            page, namespace = 0, parent.key
        else:
            page, namespace = int(parent.slots[-1]) // self._page_size, b""
        self._changes.append(Stored(page, namespace, key, self._pages(slots)))

    def moved(self, slots: np.ndarray, target: np.ndarray, to_host: bool) -> None:
        self._changes.append(Moved(self._pages(slots, not to_host), self._pages(target, to_host)))

    def removed(self, slots: np.ndarray, on_host: bool) -> None:
        self._changes.append(Removed(self._pages(slots, on_host)))

    def cleared(self) -> None:
        self._changes.append(Cleared())

    def step(self) -> None:
        """The step is over."""
        if self._changes:
            self._send(self._encoder.encode(Changes(time.time(), self._changes)))
            self._changes.clear()

    def _pages(self, slots: np.ndarray, on_host: bool = False) -> bytes:
        return (slots[:: self._page_size] // (-self._page_size if on_host else self._page_size)).tobytes()


class BlockEvents:
    """Turns changes into events: a name, and the fields in the order in which the array encoding has them.

    Nobody is told of a block that goes to host memory and comes back: who asks for it here will find it, and for a
    router that is what counts.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._digests: dict[int, bytes] = {}  # of every cached page, by its number

    def of(self, change: Change) -> tuple[str, dict[str, Any]] | None:
        """None where there is nothing to tell."""
        if isinstance(change, Moved):
            digests = [self._digests.pop(page) for page in unpack_ids(change.pages)]
            self._digests.update(zip(unpack_ids(change.targets), digests, strict=True))
            return None
        if isinstance(change, Stored):
            return "BlockStored", self._stored(change)
        if isinstance(change, Removed):
            pages = unpack_ids(change.pages)
            pages.reverse()  # no block goes before one that continues it
            hashes = [block_hash(self._digests.pop(page)) for page in pages]
            return "BlockRemoved", {"block_hashes": hashes, "medium": MEDIUM}
        self._digests.clear()
        return "AllBlocksCleared", {}

    def _stored(self, change: Stored) -> dict[str, Any]:
        digest = self._digests[change.parent] if change.parent else root_digest(change.namespace)
        parent_hash = block_hash(digest) if change.parent else None
        pages = unpack_ids(change.pages)
        block_bytes = self._page_size * TOKEN_BYTES
        hashes = []
        for index, page in enumerate(pages):
            tokens = change.key[index * block_bytes : (index + 1) * block_bytes]
            digest = self._digests[page] = sha256(digest + tokens).digest()
            hashes.append(block_hash(digest))
        fields: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": parent_hash,
            "token_ids": unpack_ids(change.key).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        if change.namespace:
            fields["extra_keys"] = [[namespace_name(change.namespace)], *[None] * (len(hashes) - 1)]
        return fields


def root_digest(namespace: bytes) -> bytes:
    """What the first page of a prompt takes for its parent's digest: nothing in the namespace that all share."""
    return sha256(namespace).digest() if namespace else b""


def block_hash(digest: bytes) -> int:
    """As it stands in events: unsigned, 64 bits."""
    return int.from_bytes(digest[:8], "big")


def namespace_name(namespace: bytes) -> str:
    """Tells namespaces apart without giving away what clients keep to themselves."""
    return root_digest(namespace).hex()[:16]
