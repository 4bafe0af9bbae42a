"""L2, leader: the socket on which requests arrive, and the only clock below the frontend."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from srt.messages import Inbox
from srt.transport import pull

HEARTBEAT_MS = 1000
"""How long an idle leader sleeps at most before it shows that it lives."""


class LeaderIntake:
    """`on_heartbeat` is called before each wait and each time one passes without a message."""

    def __init__(self, address: str, context: zmq.Context, on_heartbeat: Callable[[], None]) -> None:
        self._socket = pull(address, context)
        self._number = 0
        self._on_heartbeat = on_heartbeat

    def next(self, wait: bool) -> Inbox:
        if wait:
            self._on_heartbeat()
            while not self._socket.poll(HEARTBEAT_MS):
                self._on_heartbeat()
        items = []
        while True:
            try:
                items.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        self._number += 1
        return Inbox(self._number, time.monotonic(), tuple(items))
