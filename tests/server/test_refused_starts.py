"""A server that cannot be: one line that says why, exit code 1, nothing left running. No model is loaded for it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from server_harness import refused_start

from srt.model_files import ModelFiles


def refusal(*flags: str, port: int | None = None) -> str:
    """The line that explains; it must be the only one of its kind."""
    log = refused_start(*flags, port=port)
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if line.startswith("lockstep: ")]
    assert len(lines) == 1, log
    assert log.rstrip().endswith(lines[0]), "the explanation should come last"
    return lines[0]


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        log = refused_start(port=port)
    assert log.splitlines() == [f"lockstep: port {port} in use on 127.0.0.1; choose another with --port"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--page-size", "0"), ["--page-size", "at least 1"]),
        (("--max-running-requests", "-3"), ["--max-running-requests", "at least 1"]),
        (("--port", "70000"), ["--port", "65535"]),
        (("--mem-fraction-static", "1.5"), ["--mem-fraction-static", "between 0 and 1"]),
        (("--page-size", "many"), ["--page-size", "many"]),
        (("--dtype", "int3"), ["--dtype", "int3", "float32"]),
        (("--no-such-flag",), ["--no-such-flag"]),
        (("--context-length", "9000000"), ["--context-length", "8192"]),
        (("--tp-size", "2"), ["--tp-size 2", "9 heads", "3 KV heads", "1, 3"]),
        (("--host", "no.such.host.invalid"), ["--host", "no.such.host.invalid"]),
        (("--host", "192.0.2.1"), ["--host", "192.0.2.1"]),
        (("--load-format", "dummy", "--mem-fraction-static", "0.0001"), ["--mem-fraction-static"]),
        (("--load-format", "dummy", "--chat-template", "/no/such/template.jinja"), ["--chat-template", "No such"]),
    ],
)
def test_bad_flags(flags: tuple[str, ...], words: list[str]) -> None:
    line = refusal(*flags)
    assert all(word in line for word in words), line


def test_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal("--model-path", str(tmp_path / "nothing"))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Not a model.")
    assert "is not a model" in refusal("--model-path", str(tmp_path / "notes.txt"))


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "model.gguf" in refusal("--model-path", str(tmp_path / "model.gguf"))


def test_empty_folder(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal("--model-path", str(tmp_path))


@pytest.fixture
def folder(tmp_path: Path, default_model: ModelFiles) -> Path:
    """The default model's, without weights."""
    for file in default_model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_folder_without_weights(folder: Path) -> None:
    assert "safetensors" in refusal("--model-path", str(folder))


def test_weights_that_are_cut_off(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b'{"model.norm.weight"')
    assert "cut off" in refusal("--model-path", str(folder))


def test_unsupported_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["BertForMaskedLM"], model_type="bert")
    (folder / "config.json").write_text(json.dumps(config))
    line = refusal("--model-path", str(folder), "--load-format", "dummy")
    assert "BertForMaskedLM" in line
    assert "Llama" in line
