"""The routes that tell the server what to do."""

import asyncio
import gc
import json
import logging
import socket
import tempfile
import threading
import time

import pytest
from frontend_harness import Server, send_request

from srt.frontend.errors import RequestError
from srt.messages import ContinueGeneration, PauseGeneration, StartProfile, StopProfile, UpdateWeights
from srt.model_config import ModelConfig
from srt.weight_names import weight_shapes

GENERATE = "/generate"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), dp_size=2) as running:
        yield running


@pytest.fixture(autouse=True)
def quiet_engine(server):
    yield
    told(server, "/continue_generation")
    for engine in server.engines:
        engine.reset()


def asked(server):
    return [[type(item)(0, *[getattr(item, name) for name in item.__struct_fields__[1:]]) for item in engine.asked]
            for engine in server.engines]  # fmt: skip


def told(server, path, body=None):
    return server.request("POST", path, body)


@pytest.mark.parametrize(
    ("body", "retract"), [(None, False), ({"mode": "in_place"}, False), ({"mode": "retract"}, True)]
)
def test_pause_and_continue(server, body, retract):
    assert told(server, "/pause_generation", body)[0] == 200
    assert told(server, "/continue_generation")[0] == 200
    assert asked(server) == [[PauseGeneration(0, retract), ContinueGeneration(0)]] * 2


def test_a_body_whose_end_comes_late_and_is_all_of_it(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"POST /pause_generation HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        time.sleep(0.05)
        sock.sendall(b"0\r\n\r\n")
        assert sock.recv(65536).split()[1] == b"200"
    assert told(server, "/continue_generation")[0] == 200


def test_a_pause_aborts_unless_it_is_told_otherwise(server):
    for engine in server.engines:
        engine.hold_at = 3
    sock, _ = server.open_stream(GENERATE, {"text": "ab"})
    with sock:
        told(server, "/pause_generation", {})
        server.wait_for(lambda: sum(len(engine.aborted) for engine in server.engines) == 1)
    code, _, raw = told(server, "/pause_generation", {"mode": "gently"})
    assert (code, b"it takes abort, retract, in_place" in raw) == (400, True)


@pytest.fixture
def slow_update(server, monkeypatch, tmp_path):
    """Sends an update that has come as far as the engine, which does not answer. Gives its socket."""
    monkeypatch.setattr("srt.frontend.administration.Administration._compatible_folder", lambda self, path: tmp_path)
    server.engine.may_answer.clear()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        send_request(sock, "/update_weights_from_disk", {"model_path": "x"})
        server.wait_for(lambda: server.engine.asked)
        yield sock
    server.engine.may_answer.set()


def test_an_update_is_not_left_half_done(server, slow_update):
    slow_update.close()
    server.get("/version")  # by now it is known that the client has left
    server.engine.may_answer.set()
    kinds = [PauseGeneration, UpdateWeights, ContinueGeneration]
    server.wait_for(lambda: list(map(type, server.engine.asked)) == kinds)
    server.wait_for(lambda: not server.services.engines.paused)


def test_a_refusal_that_nobody_awaits_is_no_mistake(server, monkeypatch, caplog):
    asked, may_answer = threading.Event(), threading.Event()

    def refuse(self, path):
        asked.set()
        may_answer.wait(60)
        raise RequestError("no")

    monkeypatch.setattr("srt.frontend.administration.Administration._compatible_folder", refuse)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        send_request(sock, "/update_weights_from_disk", {"model_path": "x"})
        assert asked.wait(60)
    server.get("/version")  # by now it is known that the client has left
    may_answer.set()
    told(server, "/continue_generation")  # which waits until the update is over
    gc.collect()
    server.get("/version")
    assert not caplog.records


def test_a_pause_waits_for_an_update(server, slow_update):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        send_request(sock, "/pause_generation", {"mode": "in_place"})
        server.get("/version")
        server.engine.may_answer.set()
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    kinds = [PauseGeneration, UpdateWeights, ContinueGeneration, PauseGeneration]
    assert list(map(type, server.engine.asked)) == kinds
    assert server.services.engines.paused
    told(server, "/continue_generation")


def test_a_pause_that_is_not_answered_in_time_counts(server):
    server.engine.may_answer.clear()
    with pytest.raises(asyncio.TimeoutError):
        server.run(asyncio.wait_for(server.services.engines.pause(), 0.01))
    assert server.services.engines.paused
    server.engine.may_answer.set()
    told(server, "/continue_generation")
    assert not server.services.engines.paused


def test_profiles(server, tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    code, _, raw = told(server, "/start_profile", {"output_dir": str(folder), "num_steps": 7, "activities": ["CPU"]})
    assert (code, str(folder) in raw.decode(), folder.is_dir()) == (200, True, True)
    assert told(server, "/stop_profile")[0] == 200
    assert asked(server) == [[StartProfile(0, str(folder), 7), StopProfile(0)]] * 2
    server.engines[1].fault = "A profile is being made already."
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    code, _, raw = told(server, "/start_profile")
    assert (code, "already" in raw.decode()) == (400, True)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "body",
    [
        {"num_steps": 0}, {"num_steps": 10**6}, {"output_dir": "here"}, {"with_stack": True},
        {"output_dir": "/tmp/\0"}, {"output_dir": "/tmp/" + "x" * 300}, {"output_dir": "/dev/null/x"},
    ],
)  # fmt: skip
def test_profiles_that_cannot_be(server, body):
    assert told(server, "/start_profile", body)[0] == 400
    assert asked(server) == [[], []]


def test_requests_are_logged_when_they_are_wanted(server, caplog):
    caplog.set_level(logging.INFO)

    def lines():
        sampling = {"max_new_tokens": 100, "temperature": 0.5, "stop": ["a secret"]}
        server.ok(GENERATE, {"text": "abc", "rid": "mine", "sampling_params": sampling})
        said = [record.getMessage() for record in caplog.records if "request mine" in record.getMessage()]
        caplog.clear()
        return said

    assert lines() == []
    assert told(server, "/configure_logging", {"log_requests": True})[0] == 200
    assert "97" not in "".join(lines()), "no text if nobody asked for it"
    for level, shown in enumerate(
        (
            (),
            ("{'temperature': 0.5, 'stop': 1}",),
            ("'temperature': 0.5", "[97, 98, 99]", "and more"),
            ("[97, 98, 99]",),
        )
    ):
        assert told(server, "/configure_logging", {"log_requests": True, "log_requests_level": level})[0] == 200
        came, ended = lines()
        assert "3 tokens in its prompt" in came
        assert "length, 100 tokens generated" in ended
        for part in shown:
            assert part in came + ended
        assert ("secret" in came) == ("[97" in came) == (level >= 2)
    server.ok(GENERATE, {"text": "a", "rid": "two\nlines"})
    assert [record.getMessage()[:20] for record in caplog.records] == ["request two\\nlines c", "request two\\nlines e"]
    caplog.clear()
    assert told(server, "/configure_logging", {"log_requests": False, "log_level": "info"})[0] == 200
    assert lines() == []
    for fault in ({"log_requests_level": 4}, {"log_level": "loud"}, {"dump_requests_folder": "/x"}):
        assert told(server, "/configure_logging", fault)[0] == 400


SHAPES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 4096,
    "torch_dtype": "float32", "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip


def checkpoint(folder, **changes):
    """Only what is looked at before weights are read: shapes."""
    config = {**SHAPES, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in weight_shapes(ModelConfig.from_hf(config)).items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))
    return folder


def test_weights_are_looked_at_before_anything_stops(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    with Server(folder, tokenizer_path=str(folder)) as server:
        model = ModelConfig.from_hf({**SHAPES, "torch_dtype": "bfloat16", "eos_token_id": [257, 256]})
        object.__setattr__(server.services, "model", model)
        good = checkpoint(tmp_path / "good")
        wider = checkpoint(tmp_path / "wider", hidden_size=16)
        cut = checkpoint(tmp_path / "cut")
        (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
        endless = checkpoint(tmp_path / "endless")
        (endless / "config.json").write_text(json.dumps({**SHAPES, "num_hidden_layers": 10**9}))
        no_file = checkpoint(tmp_path / "no file")
        (no_file / "model.safetensors").unlink()
        (no_file / "model.safetensors").mkdir()
        for path in (
            wider,
            cut,
            endless,
            no_file,
            tmp_path / "nowhere",
            "~nobody.at.all/x",
            "/" + "x" * 300,
            "/tmp/\0",
        ):
            assert told(server, "/update_weights_from_disk", {"model_path": str(path)})[0] == 400
        assert server.engine.asked == []
        body = {"model_path": str(good), "weight_version": "v2", "flush_cache": True}
        code, _, raw = told(server, "/update_weights_from_disk", body)
        assert code == 200, raw
        assert json.loads(raw) == {"success": True, "message": "", "num_paused_requests": 0}
        assert asked(server) == [[PauseGeneration(0, True), UpdateWeights(0, str(good)), ContinueGeneration(0)]]
        info = server.get("/model_info")[1]
        assert (info["weight_version"], info["model_path"]) == ("v2", str(good))
        assert server.ok(GENERATE, {"text": "a"})["meta_info"]["weight_version"] == "v2"


@pytest.mark.parametrize("body", [None, b"", {}, {"model_path": "x", "load_format": "gguf"}])
def test_weights_that_are_not_said(server, body):
    assert told(server, "/update_weights_from_disk", body)[0] == 400


def test_weights_that_an_engine_cannot_take(server, monkeypatch, tmp_path):
    monkeypatch.setattr("srt.frontend.administration.Administration._compatible_folder", lambda self, path: tmp_path)
    told(server, "/pause_generation", {"mode": "in_place"})
    server.engines[1].fault = "rank 1: the disk is gone"
    code, _, raw = told(server, "/update_weights_from_disk", {"model_path": "x"})
    assert (code, json.loads(raw)["success"], json.loads(raw)["message"]) == (400, False, "rank 1: the disk is gone")
    pauses, update = [PauseGeneration(0), PauseGeneration(0, True)], UpdateWeights(0, str(tmp_path))
    assert asked(server) == [[*pauses, update, UpdateWeights(0, None)], [*pauses, update]], "all have the old ones"
    assert server.get("/model_info")[1]["weight_version"] == "default"
    server.engines[1].fault = ""
    told(server, "/continue_generation")


def test_engines_of_which_one_cannot_go_back_end(monkeypatch, tmp_path):
    monkeypatch.setattr("srt.frontend.administration.Administration._compatible_folder", lambda self, path: tmp_path)
    folder = tmp_path / "s"
    folder.mkdir()
    with Server(folder, dp_size=2) as server:
        takes, refuses = server.engines
        refuses.fault = "rank 0: the disk is gone"
        hear = takes._hear

        def hear_and_fail_to_go_back(item, *senders):
            takes.fault = "rank 0: the disk is gone" if item == UpdateWeights(item.ticket, None) else ""
            hear(item, *senders)

        takes._hear = hear_and_fail_to_go_back
        code, _, raw = told(server, "/update_weights_from_disk", {"model_path": "x"})
        assert (code, "different weights" in json.loads(raw)["error"]["message"]) == (503, True)
        assert "different weights" in server.run(server.frontend.fault())
        assert server.request("GET", "/health")[0] == 503
