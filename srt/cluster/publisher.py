"""L5, leader: the sockets on which KV events leave, and their thread. Owns the sequence numbers and the replay buffer.

A PUB socket sends each step's events as `[topic, sequence number, payload]`; a ROUTER socket sends again what a
subscriber has missed, from the number that it asks for. Numbers are 8 bytes, big-endian, from 0 and without a gap; the
payload is a msgpack array of the time in seconds, the events, and the engine's index.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import Any

import msgspec
import zmq

from srt.cluster.kv_events import BlockEvents, Changes, PageLog
from srt.config import ConfigError, KvEventsConfig

END_OF_REPLAY = b"\xff" * 8
"""The number of the message that follows the last one of a replay."""


class Publisher:
    """Publishes what its `log`, a `PageObserver` of the prefix cache, writes down."""

    def __init__(self, config: KvEventsConfig, dp_rank: int, page_size: int) -> None:
        """ConfigError if an address cannot be had."""
        self._dp_rank = dp_rank
        self._topic = config.topic.encode()
        self._as_map = config.event_encoding == "map"
        self._events = BlockEvents(page_size)
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Changes)
        self._context = zmq.Context()
        # A step waits when too many are unpublished; nobody waits for a subscriber.
        self._inlet = self._context.socket(zmq.PAIR)
        self._inlet.setsockopt(zmq.SNDHWM, config.max_queue_size)
        self._changes = self._context.socket(zmq.PAIR)
        self._changes.setsockopt(zmq.RCVHWM, 1)
        self._changes.bind("inproc://changes")
        self._inlet.connect("inproc://changes")
        self._replay: zmq.Socket | None = None
        try:
            self._pub = self._open(zmq.PUB, config.hwm, config.endpoint_of(dp_rank), config.binds)
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, 0, config.replay_endpoint_of(dp_rank), True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()
        self.log = PageLog(page_size, self._send)

    def close(self) -> None:
        """Publishes what is there and closes the sockets."""
        self._inlet.send(b"")
        self._thread.join()
        self._context.destroy()

    def _open(self, kind: int, high_water_mark: int, endpoint: str, binds: bool) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {endpoint} cannot be used: {zmq.strerror(error.errno)}") from None
        return socket

    def _send(self, changes: bytes) -> None:
        assert self._thread.is_alive(), "the publisher of KV events has died"
        self._inlet.send(changes)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in filter(None, (self._changes, self._replay)):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._changes in ready:
                data = self._changes.recv()
                if not data:
                    return
                self._publish(self._decoder.decode(data))
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())

    def _publish(self, step: Changes) -> None:
        told = [event for change in step.changes if (event := self._events.of(change)) is not None]
        if not told:
            return
        events = [self._wire(*event) for event in told]
        number = self._sequence.to_bytes(8, "big")
        payload = self._encoder.encode((step.time, events, self._dp_rank))
        self._sequence += 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def _wire(self, name: str, fields: dict[str, Any]) -> dict[str, Any] | list[Any]:
        return {"type": name, **fields} if self._as_map else [name, *fields.values()]

    def _answer(self, request: list[bytes]) -> None:
        """A request that is none is ignored: whoever asks this has no other way to be told."""
        identity, start = request[0], request[-1]
        if len(request) != 3 or len(start) != 8:
            return
        oldest = self._sequence - len(self._sent)
        skipped = max(0, int.from_bytes(start, "big", signed=True) - oldest)
        for number, payload in islice(self._sent, skipped, None):
            self._replay.send_multipart((identity, b"", self._topic, number, payload))
        self._replay.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))
