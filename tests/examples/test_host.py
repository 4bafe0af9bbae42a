"""What the examples say where something that they need is not there."""

import argparse
import socket

import pytest

from examples.host import device_name, free_port, json_lines, need_server
from srt.hardware import cuda_device_count


def test_a_server_must_be_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        need_server(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(SystemExit, match=f"no server at {url} .*python -m launch"):
        need_server(url)


def test_arguments_are_refused_with_a_sentence(tmp_path):
    file = tmp_path / "cases.jsonl"
    file.write_text('{"schema": {"title": "a\u2028b"}}\n{"schema": true}', encoding="utf-8")
    assert json_lines(str(file)) == [{"schema": {"title": "a\u2028b"}}, {"schema": True}]
    file.write_text("schema")
    for path in (file, tmp_path / "none.jsonl"):
        with pytest.raises(argparse.ArgumentTypeError, match="one a line"):
            json_lines(str(path))
    assert device_name("cpu") == "cpu"
    if not cuda_device_count():
        with pytest.raises(argparse.ArgumentTypeError, match="use --device cpu"):
            device_name("cuda")
