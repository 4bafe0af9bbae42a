"""Shared: the two ends of a ZMQ pipe that carries msgspec messages over ipc:// in a private folder.

PUSH/PULL without a high-water mark: what is admitted is bounded by the queue limit at the door, and a dropped message
would be a lost request. The receiving end binds, so the order in which processes start does not matter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq


@dataclass(frozen=True)
class Endpoints:
    """Addresses of one server's pipes, all in one folder of mode 0700 that launch makes and removes.

    Of several engines each has a leader, a board and a rendezvous of its own; the detokenizer and the frontend are
    everybody's.
    """

    folder: str
    dp_rank: int = 0  # which engine's they are

    @property
    def leader(self) -> str:
        return f"ipc://{self.folder}/leader-{self.dp_rank}"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.folder}/detokenizer"

    @property
    def frontend(self) -> str:
        """The main process's."""
        return self.frontend_of(0)

    def frontend_of(self, process: int) -> str:
        """Of an HTTP worker, which are numbered from 1, or the main process."""
        return f"ipc://{self.folder}/frontend-{process}"

    @property
    def house(self) -> str:
        """Path of the main process's own HTTP socket, to which workers hand on what only it can answer."""
        return f"{self.folder}/house"

    @property
    def tally(self) -> str:
        """Path of the folder in which the processes that speak HTTP count their requests."""
        return f"{self.folder}/tally"

    @property
    def board(self) -> str:
        """Path of the file behind the shared-memory board."""
        return f"{self.folder}/board-{self.dp_rank}"

    @property
    def rendezvous(self) -> str:
        """Path of the file through which the ranks of an engine find each other."""
        return f"{self.folder}/rendezvous-{self.dp_rank}"


@dataclass(frozen=True)
class Meeting:
    """Where node 0 listens for what runs on other hosts, and the word that shows who belongs to the group."""

    host: str
    links_port: int  # for the main processes of the other nodes
    board_port: int  # for their ranks
    token: str


def push(address: str, context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def pull(address: str, context: zmq.Context) -> zmq.Socket:
    """`context` may be a zmq.asyncio one."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


class Sender:
    """Encodes and sends; never blocks, since nothing bounds the pipe."""

    def __init__(self, address: str, context: zmq.Context) -> None:
        self._socket = push(address, context)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._socket.send(self._encoder.encode(message), copy=True)


class BurstSender:
    """As a Sender; but what is said in one turn of the event loop is one message, which `bursts` reads, so that the
    other end, and a thread of ZMQ's here, wake up once for all of it."""

    def __init__(self, address: str, context: zmq.Context, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = push(address, context)
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = loop
        self._waiting: list[bytes] = []

    def send(self, message: Any) -> None:
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(self._encoder.encode(message))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._socket.closed:  # else what it was for has ended, and its requests with it
            self._socket.send(self._encoder.encode(waiting))


bursts = msgspec.msgpack.Decoder(list[bytes])
"""What a BurstSender sends: several messages, encoded."""
