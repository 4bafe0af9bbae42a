"""One server with the default model for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.server_harness import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--dtype", "float32", "--random-seed", "1") as server:
        yield server
