"""One server for all tests that need no flags of their own; where a test fails, what the servers logged."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator

import pytest
from server_harness import Server, running, started

from srt.model_files import ModelFiles


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Its chunks are small, so that tests of what is computed mix them with decode rows."""
    with running("--dtype", "float32", "--random-seed", "1", "--chunked-prefill-size", "100") as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(small_model: str) -> Iterator[Server]:
    """One request runs, one waits; started with as few descriptors as processes usually get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 1400, "this system does not give its users so many descriptors"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        limits = ("--max-running-requests", "1", "--max-queued-requests", "1")
        server = Server("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1", *limits)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with started(server):
        yield server


@pytest.fixture(scope="session")
def small_model(default_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder without weights: a Llama that splits into 1, 2, 3 and 4, with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("small-model")
    for file in default_model.folder.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(num_attention_heads=24, num_key_value_heads=12, head_dim=16)
    config.update(hidden_size=192, intermediate_size=384, num_hidden_layers=2)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections += [(f"log of {server}", server.log[-4000:]) for server in Server.running]
    return report
