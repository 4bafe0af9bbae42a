"""Shared: how the board of node 0 comes to show the ranks of other hosts.

Such a rank writes its record to the board of its own host and, through a `Mirror`, once more to a process of node 0,
whose door this is. That process waits for nothing but these writes and copies each to where it belongs, so that what a
rank wrote is there even if every other process of the group hangs or has died.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading

from srt.board import RECORD_BYTES, Board
from srt.config import ConfigError
from srt.process import ChildSpec, Ready
from srt.transport import Meeting

HELLO_SECONDS = 5.0
"""How long either end waits until it knows who the other one is."""

_HELLO = struct.Struct("<32sI")  # the group's token, the rank
_WELCOME = b"\x01"
_WRITE = struct.Struct("<II")  # where in the record, number of bytes; these follow

log = logging.getLogger(__name__)


class Mirror:
    """A rank's end. What it writes once the relay is gone is lost: with it goes node 0, and this node ends too."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """ConfigError if the relay cannot be reached or does not take this rank for one of its group."""
        address = (meeting.host, meeting.board_port)
        try:
            self._socket = socket.create_connection(address, HELLO_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_HELLO.pack(meeting.token.encode(), rank))
            welcome = self._socket.recv(1)
        except OSError as error:
            raise ConfigError(
                f"rank {rank} does not reach port {address[1]} of node 0, {address[0]}: {error}"
            ) from None
        if welcome != _WELCOME:
            raise ConfigError(f"node 0, {address[0]}, does not know the token that rank {rank} brought")
        self._socket.settimeout(None)
        self._unsent = b""

    def write(self, at: int, data: bytes, more: bool) -> None:
        """If `more` follows it travels with that."""
        self._unsent += _WRITE.pack(at, len(data)) + data
        if not more:
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
            self._unsent = b""


def main(spec: ChildSpec, ready: Ready) -> None:
    """The door of the relay's process."""
    assert spec.meeting is not None
    board = Board(spec.endpoints.board, spec.config.tp_size)
    elsewhere = range(spec.config.node_ranks.stop, spec.config.tp_size)
    family = socket.getaddrinfo(spec.meeting.host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((spec.meeting.host, 0), family=family)
    ready({"port": listener.getsockname()[1]})
    while True:
        connection, peer = listener.accept()
        arguments = (connection, peer[0], board, elsewhere, spec.meeting.token)
        threading.Thread(target=_copy, args=arguments, daemon=True).start()


def _copy(connection: socket.socket, peer: str, board: Board, elsewhere: range, token: str) -> None:
    """All that one connection brings."""
    with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
        connection.settimeout(HELLO_SECONDS)
        hello = stream.read(_HELLO.size)
        if len(hello) < _HELLO.size:
            return
        word, rank = _HELLO.unpack(hello)
        if not hmac.compare_digest(word, token.encode()) or rank not in elsewhere:
            log.warning("%s brought a wrong token, or a rank that is not elsewhere; it was not let in", peer)
            return
        connection.sendall(_WELCOME)
        connection.settimeout(None)
        while len(header := stream.read(_WRITE.size)) == _WRITE.size:
            at, length = _WRITE.unpack(header)
            if at + length > RECORD_BYTES:
                log.error("%s wrote beyond the record of rank %d; its connection is closed", peer, rank)
                return
            data = stream.read(length)
            if len(data) == length:
                board.put(rank, at, data)
