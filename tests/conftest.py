"""What tests of several rooms share: the default model, addresses of a server's pipes, and patience when it is busy."""

import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

from srt.model_files import ModelFiles, locate
from srt.transport import Endpoints

os.environ["HF_HUB_OFFLINE"] = "1"  # also of the processes that tests start: no test asks a hub

hypothesis.settings.register_profile("lockstep", deadline=None)
hypothesis.settings.load_profile("lockstep")


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """The model that is served without --model-path, fetched into the user's cache the first time."""
    return locate(None, "auto", None, log=print)


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """In a folder of its own, whose path is short enough for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        yield Endpoints(folder)
