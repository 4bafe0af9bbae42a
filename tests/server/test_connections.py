"""Many clients that only hold a connection open keep nobody else out."""

from __future__ import annotations

import contextlib
import resource
import socket

from server_harness import Server


def test_more_connections_than_the_usual_descriptors(narrow_server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.ExitStack() as stack:
            for number in range(1100):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", narrow_server.port), timeout=60))
                if number % 2:
                    sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert narrow_server.generate([1, 2, 3], 2)["meta_info"]["completion_tokens"] == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
