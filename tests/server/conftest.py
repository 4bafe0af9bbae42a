"""One server for all tests that need no flags of their own; where a test fails, what the servers logged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_harness import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--dtype", "float32", "--random-seed", "1") as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections += [(f"log of {server}", server.log[-4000:]) for server in Server.running]
    return report
