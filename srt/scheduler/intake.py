"""L2, each rank: where inboxes come from. The leader has a socket and the only clock below the frontend; it passes on
what it hears, byte for byte, and followers hear nothing else.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
import zmq

from srt.messages import GrammarReady, Inbox
from srt.transport import bursts, pull

HEARTBEAT_MS = 1000
"""How long an idle leader waits for a message before it sends an empty inbox, to show that it lives."""

LOOK_MS = 0.05
"""How often an idle leader looks at the board for what it waits to announce."""


class Broadcast(Protocol):
    """From the leader to every follower, in order, without loss."""

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes: ...


class Announcements(Protocol):
    """What the leader has to say itself, beside what it hears."""

    @property
    def awaited(self) -> bool:
        """Whether there may be one soon."""

    def take(self) -> list[GrammarReady]: ...


class LeaderIntake:
    """Without followers there is no broadcast."""

    def __init__(
        self,
        address: str,
        context: zmq.Context,
        broadcast: Broadcast | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self._socket = pull(address, context)
        self._announcements = announcements
        self._number = 0
        self._broadcast = broadcast
        self._encoder = msgspec.msgpack.Encoder()

    def next(self, wait: bool) -> Inbox:
        items = self._announced()
        if wait and not items:
            items = self._wait()
        while True:
            try:
                items += bursts.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        self._number += 1
        inbox = Inbox(self._number, time.monotonic(), tuple(items))
        if self._broadcast is not None:
            self._broadcast.send(self._encoder.encode(inbox))
        return inbox

    def _announced(self) -> list[bytes]:
        if self._announcements is None:
            return []
        return [self._encoder.encode(item) for item in self._announcements.take()]

    def _wait(self) -> list[bytes]:
        """Until there is something to hear; what is announced meanwhile."""
        if self._announcements is None or not self._announcements.awaited:
            self._socket.poll(HEARTBEAT_MS)
            return []
        end = time.monotonic() + HEARTBEAT_MS / 1000
        while time.monotonic() < end:
            if self._socket.poll(0):
                return []
            if items := self._announced():
                return items
            time.sleep(LOOK_MS / 1000)
        return []


class FollowerIntake:
    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._number = 0
        self._decoder = msgspec.msgpack.Decoder(Inbox)

    def next(self, wait: bool) -> Inbox:
        inbox = self._decoder.decode(self._broadcast.receive())
        self._number += 1
        assert inbox.number == self._number, f"inbox {inbox.number} came where {self._number} was due"
        return inbox
