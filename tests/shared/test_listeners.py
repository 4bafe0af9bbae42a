"""The sockets of HTTP: who may share an address, and how long a client may leave its answer unread."""

import errno
import socket

import pytest

from srt import listeners
from srt.config import ConfigError
from srt.listeners import listen


@pytest.mark.parametrize("number", [1, 3])
def test_a_port_belongs_to_one_server(number):
    first = listen("127.0.0.1", 0, number)
    port = first[0].getsockname()[1]
    assert [one.getsockname()[1] for one in first] == [port] * number
    for others in (1, 2):
        with pytest.raises(ConfigError, match=f"port {port} in use"):
            listen("127.0.0.1", port, others)
    for one in first:
        one.close()
    for one in listen("127.0.0.1", port, 2):
        one.close()


def test_connections_are_shared_out():
    sockets = listen("127.0.0.1", 0, 2)
    clients = [socket.create_connection(sockets[0].getsockname()) for _ in range(64)]
    for one in sockets:
        one.accept()[0].close()  # each has some
    for one in (*sockets, *clients):
        one.close()


def test_who_reads_nothing_loses_the_connection(monkeypatch):
    monkeypatch.setattr(listeners, "SILENT_SECONDS", 1)
    (listener,) = listen("127.0.0.1", 0, 1)
    with socket.create_connection(listener.getsockname()), listener, listener.accept()[0] as connection:
        connection.settimeout(60)
        with pytest.raises(TimeoutError) as caught:
            connection.sendall(bytes(2**26))
    assert caught.value.errno == errno.ETIMEDOUT  # the kernel's; this test's own has no number
