"""A router's side of KV events: an index of blocks, built from nothing but what comes over the wire."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import numpy as np
import zmq

from radix import Ledger

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Those that are always there, in the order of the array encoding. BlockStored may have `extra_keys` behind them."""

END_OF_REPLAY = b"\xff" * 8


def fields_of(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        name = event["type"]
        fields = {key: value for key, value in event.items() if key != "type"}
    else:
        name = event[0]
        fields = dict(zip((*FIELDS[name], "extra_keys"), event[1:], strict=False))
    assert [key for key in fields if key != "extra_keys"] == list(FIELDS[name])
    return name, fields


class Index:
    """`blocks`: hash -> the hash of the block before it (None at a root), its tokens, and its namespace's name."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        self.block_size = 0

    def take(self, event: Any) -> None:
        name, fields = fields_of(event)
        if name == "BlockStored":
            self._store(**fields)
        elif name == "BlockRemoved":
            assert fields["medium"] == "GPU"
            for block in fields["block_hashes"]:
                assert all(parent != block for parent, _, _ in self.blocks.values()), "a later block is still there"
                del self.blocks[block]
        else:
            self.blocks.clear()

    def _store(
        self, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys=None
    ) -> None:
        assert (lora_id, medium, lora_name) == (None, "GPU", None)
        assert len(token_ids) == block_size * len(block_hashes) > 0
        assert parent_block_hash is None or parent_block_hash in self.blocks, "the parent was not announced"
        namespace = self.blocks[parent_block_hash][2] if parent_block_hash is not None else ""
        if extra_keys is not None:
            assert parent_block_hash is None
            assert extra_keys[1:] == [None] * (len(block_hashes) - 1)
            (namespace,) = extra_keys[0]
        self.block_size = block_size
        parent = parent_block_hash
        for number, block in enumerate(block_hashes):
            assert 0 <= block < 2**64
            assert block not in self.blocks
            tokens = tuple(token_ids[number * block_size : (number + 1) * block_size])
            self.blocks[block] = (parent, tokens, namespace)
            parent = block

    def prefixes(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Hash of the block that ends each prefix, by namespace and all its tokens."""
        found = {}
        for block, (parent, tokens, namespace) in self.blocks.items():
            while parent is not None:
                parent, before, _ = self.blocks[parent]
                tokens = before + tokens
            found[namespace, tokens] = block
        return found


def expected_prefixes(ledger: Ledger) -> dict[tuple[str, tuple[int, ...]], int]:
    """What an index must have of this tree, with each hash computed from the root."""
    found = {}
    stack = [(namespace, b"", root) for namespace, root in ledger.cache.roots.items()]
    while stack:
        namespace, before, node = stack.pop()
        for child in node.children.values():
            key = before + child.key
            for end in range(len(before) // 4 + ledger.page_size, len(key) // 4 + 1, ledger.page_size):
                tokens = tuple(np.frombuffer(key, "<i4")[:end].tolist())
                name = hashlib.sha256(namespace).hexdigest()[:16] if namespace else ""
                found[name, tokens] = reference_hash(namespace, tokens, ledger.page_size)
            stack.append((namespace, key, child))
    return found


def reference_hash(namespace: bytes, tokens: tuple[int, ...], page_size: int) -> int:
    digest = hashlib.sha256(namespace).digest() if namespace else b""
    for start in range(0, len(tokens), page_size):
        page = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        digest = hashlib.sha256(digest + page).digest()
    return struct.unpack(">Q", digest[:8])[0]


class Subscriber:
    """Listens to one engine, and asks for what it has missed. An Index of all up to `next_number`."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.index = Index()
        self.next_number = 0
        self.dp_ranks: list[int | None] = []
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._sub.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear(self, milliseconds: int) -> bool:
        """Takes the next message, and before it what was sent until then; False if none comes."""
        if not self._sub.poll(milliseconds):
            return False
        topic, number, payload = self._sub.recv_multipart()
        assert topic == self._topic
        number = int.from_bytes(number, "big")
        if number > self.next_number:
            self.replay()
        if number == self.next_number:  # else the replay had it
            self._take(payload)
        return True

    def replay(self) -> int:
        """How many messages came."""
        self._replay.send_multipart((b"", self.next_number.to_bytes(8, "big")))
        count = 0
        while (message := self._next_replayed())[1] != END_OF_REPLAY:
            assert message[:2] == [self._topic, self.next_number.to_bytes(8, "big")], "not the next one"
            self._take(message[2])
            count += 1
        assert message == [b"", END_OF_REPLAY, b""]
        return count

    def _next_replayed(self) -> list[bytes]:
        assert self._replay.poll(20_000)
        empty, *message = self._replay.recv_multipart()
        assert empty == b""
        return message

    def _take(self, payload: bytes) -> None:
        time, events, dp_rank = msgspec.msgpack.decode(payload)
        assert time > 1e9
        assert events
        if dp_rank not in self.dp_ranks:
            self.dp_ranks.append(dp_rank)
        for event in events:
            self.index.take(event)
        self.next_number += 1
