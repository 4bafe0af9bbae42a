"""Many clients that only hold a connection open keep nobody else out."""

from __future__ import annotations

import contextlib
import resource
import socket

from server_harness import running


def test_more_connections_than_the_usual_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 1400, "this system does not give its users so many descriptors"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        with running("--load-format", "dummy", "--random-seed", "1") as server, contextlib.ExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for number in range(1100):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                if number % 2:
                    sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
            assert server.post("/generate", body).status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
