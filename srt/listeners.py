"""Shared, main process: the sockets on which the house listens for HTTP."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from srt.config import ConfigError
from srt.transport import Endpoints

SILENT_SECONDS = 120
"""How long a client may leave what waits for it unread before the kernel ends its connection."""


def listen(host: str, port: int, number: int) -> list[socket.socket]:
    """Takes the address before anything slow happens. Connections wait in the backlog until the model is there.

    Between so many sockets as `number` the kernel shares connections out.
    """
    first = _listener(host, port, alone=number == 1)
    others = [_listener(host, first.getsockname()[1], alone=False, first=False) for _ in range(number - 1)]
    return [first, *others]


def own_listener(listeners: Sequence[socket.socket], endpoints: Endpoints) -> socket.socket | None:
    """Where the main process speaks HTTP: to clients, to the workers which do in its place, or not at all."""
    if len(listeners) <= 1:
        return next(iter(listeners), None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(endpoints.house)
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def _listener(host: str, port: int, *, alone: bool, first: bool = True) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, not first)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)  # also of what it accepts
    try:
        listener.bind(address)
        # Others may have its address only once it is bound: so of two servers the second is refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, not alone)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} in use on {host}; choose another with --port") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port {port} may not be used by this user; try one above 1023") from None
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener.setblocking(False)
    return listener
