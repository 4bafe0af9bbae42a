"""One server for all tests that need no flags of their own; where a test fails, what the servers logged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
from server_harness import Server, running

from srt.model_files import ModelFiles


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--dtype", "float32", "--random-seed", "1") as server:
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
