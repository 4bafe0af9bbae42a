"""Tensors from safetensors, GGUF and seeds, against transformers, the gguf package and scalar dequantization."""

import dataclasses
import errno
import io

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from srt.executor.weights import dequantize, iterate_weights, unpermute
from srt.gguf_files import TENSOR_TYPES, GGUFTensor
from srt.model_files import locate
from srt.weight_names import weight_shapes

FAMILIES = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        self.write("")


def quiet(message):
    pass


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [False, True])
def test_safetensors_are_transformers_own(tmp_path, family, shards):
    name, extra = FAMILIES[family]
    expected = checkpoints.hf_folder(tmp_path / "m", name, max_shard_size="1MB" if shards else "5GB", **extra)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1 or not shards
    files = locate(str(tmp_path / "m"), "auto", None, log=quiet)
    found = dict(iterate_weights(files, torch.float32))
    assert found.keys() == expected.keys() == weight_shapes(files.model_config).keys()
    for key, weight in found.items():
        assert torch.equal(weight, expected[key]), key


def test_a_log_that_is_full_keeps_nobody_from_loading(tmp_path, monkeypatch):
    checkpoints.hf_folder(tmp_path, "llama")
    files = locate(str(tmp_path), "auto", None, log=quiet)
    monkeypatch.setattr("sys.stderr", FullDisk())
    assert dict(iterate_weights(files, torch.float32, progress=True)).keys() == weight_shapes(files.model_config).keys()


@pytest.mark.slow  # answers of the whole model are compared in each run
def test_the_default_model_is_what_transformers_reads(default_model):
    found = dict(iterate_weights(default_model, torch.float32))
    config = transformers.AutoConfig.from_pretrained(default_model.folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(
        str(default_model.gguf_path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        assert torch.equal(weight, expected[key]), key


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "F32"),
        ("llama", "F16"),
        ("llama", "BF16"),
        ("llama", "Q8_0"),
        ("llama-tied", "Q4_0"),
        ("llama-biased", "Q4_1"),
        ("llama", "Q5_0"),
        ("llama", "Q5_1"),
        ("qwen2", "Q8_0"),
        ("qwen3", "F16"),
    ],
)
def test_gguf_gives_the_weights_that_were_written(tmp_path, family, kind):
    name, extra = FAMILIES[family]
    path = tmp_path / "m.gguf"
    expected = checkpoints.gguf_file(path, name, kind=GGMLQuantizationType[kind], **extra)
    files = locate(str(path), "auto", None, log=quiet)
    assert files.weights == "gguf"
    assert files.model_config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    found = dict(iterate_weights(files, torch.float32))
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        assert np.array_equal(weight.numpy(), expected[key]), key


def test_unpermute_undoes_the_converters_permutation():
    values = np.random.default_rng(1).normal(size=(6 * 10, 7)).astype(np.float32)
    assert np.array_equal(unpermute(checkpoints.permute(values, 6), 6), values)
    assert not np.array_equal(checkpoints.permute(values, 6), values)
    assert np.array_equal(unpermute(checkpoints.permute(values[:, 0], 3), 3), values[:, 0])


def scalar_k_quant(kind: str, block: bytes) -> list[float]:
    """One super-block of 256 weights, element by element, from the layout that ggml-common.h describes."""

    def half(at):
        return float(np.frombuffer(block[at : at + 2], "<f2")[0])

    if kind == "Q6_K":
        low, high, scales, scale = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), half(208)
        values = []
        for index in range(256):
            chunk, inner = divmod(index, 128)
            quarter, lane = divmod(inner, 32)
            nibble = low[chunk * 64 + (quarter % 2) * 32 + lane] >> (4 * (quarter // 2)) & 15
            upper = high[chunk * 32 + lane] >> (2 * quarter) & 3
            values.append(scale * int(scales[index // 16]) * ((nibble | upper << 4) - 32))
        return values
    scale, least, packed = half(0), half(2), block[4:16]

    def scale_and_min(group):
        if group < 4:
            return packed[group] & 63, packed[group + 4] & 63
        low, upper = packed[group + 4], packed[group - 4] >> 6
        return low & 15 | upper << 4, low >> 4 | packed[group] >> 6 << 4

    fifth, quants = (block[16:48], block[48:]) if kind == "Q5_K" else (None, block[16:])
    values = []
    for index in range(256):
        group, lane = divmod(index, 32)
        quant = quants[group // 2 * 32 + lane] >> (4 * (group % 2)) & 15
        if fifth is not None:
            quant |= (fifth[lane] >> group & 1) << 4
        group_scale, group_min = scale_and_min(group)
        values.append(scale * group_scale * quant - least * group_min)
    return values


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_against_scalar_arithmetic(kind):
    type_id, (_, elements, block_bytes) = next(item for item in TENSOR_TYPES.items() if item[1][0] == kind)
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (6, block_bytes), np.uint8)
    halves = [208] if kind == "Q6_K" else [0, 2]
    for at in halves:  # finite scales
        blocks[:, at : at + 2] = rng.normal(size=6).astype("<f2")[:, None].view(np.uint8)
    data = np.concatenate([np.zeros(32, np.uint8), blocks.ravel()])
    tensor = GGUFTensor("t", (3, 2 * elements), type_id, 32, blocks.nbytes)
    found = dequantize(data, tensor)
    expected = np.array([scalar_k_quant(kind, row.tobytes()) for row in blocks]).reshape(3, 2 * elements)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path):
    checkpoints.hf_folder(tmp_path / "m", "qwen3")
    for weight_file in (tmp_path / "m").glob("*.safetensors"):
        weight_file.unlink()
    files = locate(str(tmp_path / "m"), "dummy", None, log=quiet)
    first = dict(iterate_weights(files, torch.float32, seed=1))
    again = dict(iterate_weights(files, torch.float32, seed=1))
    other = dict(iterate_weights(files, torch.float32, seed=2))
    fewer = dataclasses.replace(files, model_config=dataclasses.replace(files.model_config, num_layers=1))
    shorter = dict(iterate_weights(fewer, torch.float32, seed=1))
    assert {name: tuple(weight.shape) for name, weight in first.items()} == weight_shapes(files.model_config)
    assert shorter.keys() < first.keys()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])
        assert weight.std() > 0.01
        assert torch.equal(weight, shorter.get(name, weight))
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


def test_progress_goes_to_standard_error(tmp_path, capsys):
    checkpoints.hf_folder(tmp_path / "m")
    files = locate(str(tmp_path / "m"), "auto", None, log=quiet)
    for _ in iterate_weights(files, torch.float32, progress=True):
        pass
    printed = capsys.readouterr()
    assert "loading weights: 100%" in printed.err
    assert printed.out == ""
