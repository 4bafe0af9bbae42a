"""What most tests of the frontend have in common; a module whose server needs flags has a `server` of its own."""

import pytest
from frontend_harness import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as running:
        yield running


@pytest.fixture
def quiet_engine(server):
    """The next test's engine does as usual."""
    yield
    server.engine.reset()
