"""The GGUF reader against the gguf package's, and folders made of GGUF files."""

import json
import random
import struct

import checkpoints
import gguf
import numpy as np
import pytest
from gguf import GGUFWriter

from srt.gguf_files import read_gguf
from srt.model_config import ModelError
from srt.model_files import locate

QUIET = print


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def every_type(tmp_path):
    path = tmp_path / "every.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for name, value in (("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -300), ("uint32", 2**32 - 1)):
        getattr(writer, f"add_{name}")(f"x.{name}", value)
    writer.add_int32("x.int32", -(2**31))
    writer.add_uint64("x.uint64", 2**64 - 1)
    writer.add_int64("x.int64", -(2**63))
    writer.add_float32("x.float32", 1e-5)
    writer.add_float64("x.float64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "größer 日本 🦊")
    writer.add_array("x.ints", [3, 1, 2])
    writer.add_array("x.floats", [0.5, -1.5])
    writer.add_array("x.strings", ["a", "", "é", "x" * 300])
    writer.add_tensor("odd", np.arange(7, dtype=np.float32))
    writer.add_tensor("next", np.arange(12, dtype=np.float16).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_the_gguf_packages(every_type):
    found, reference = read_gguf(every_type), gguf.GGUFReader(every_type)
    expected = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    expected["x.float32"] = 1e-5  # and not its nearest binary32
    assert found.metadata.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found.metadata[name], value)
    assert list(found.tensors) == ["odd", "next"]
    for tensor in reference.tensors:
        ours = found.tensors[tensor.name]
        assert ours.offset == tensor.data_offset
        assert ours.num_bytes == tensor.n_bytes
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type_id == tensor.tensor_type


def test_a_cut_off_file_is_refused_wherever_it_ends(every_type, tmp_path):
    whole = every_type.read_bytes()
    read_gguf(every_type)
    cut = tmp_path / "cut.gguf"
    tensor_end = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(every_type).tensors.values())
    for end in [*range(400), *range(400, tensor_end, 17)]:
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_a_damaged_file_is_refused_or_read(every_type, tmp_path):
    whole = bytearray(every_type.read_bytes())
    rng = random.Random(3)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        copy = bytearray(whole)
        at = rng.randrange(len(copy))
        copy[at : at + 4] = rng.randbytes(4)
        damaged.write_bytes(copy)
        try:
            read_gguf(damaged)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no vocabulary"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, contents, reason):
    path = tmp_path / "m.gguf"
    path.write_bytes(contents)
    with pytest.raises(ModelError, match=reason):
        locate(str(path), "auto", None, log=QUIET)
    assert not list((tmp_path / "cache" / "lockstep" / "gguf").iterdir())


def config_of(files):
    return json.loads((files.folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_shapes_are_carried_over(tmp_path, family):
    checkpoints.gguf_file(tmp_path / "m.gguf", family)
    files = locate(str(tmp_path / "m.gguf"), "auto", None, log=QUIET)
    config = files.model_config
    assert files.name == "m"
    assert config.model_type == family
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 256, 512)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 8, 2)
    assert config.head_dim == (48 if family == "qwen3" else 32)
    assert config.qkv_bias == (family == "qwen2")
    assert not config.output_bias
    assert config.qk_norm == (family == "qwen3")
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_scaling_of_positions(tmp_path):
    def config(name, metadata=None, **extra):
        path = tmp_path / f"{name}.gguf"
        checkpoints.gguf_file(path, metadata=metadata, **extra)
        return locate(str(path), "auto", None, log=QUIET).model_config

    linear = config("linear", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert (linear.rope_scaling.rope_type, linear.rope_scaling.factor) == ("linear", 4)
    yarn = config(
        "yarn",
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    )
    assert (yarn.rope_scaling.rope_type, yarn.rope_scaling.original_max_position_embeddings) == ("yarn", 64)
    assert yarn.max_position_embeddings == 256
    with pytest.raises(ModelError, match="longrope"):
        config("longrope", {"llama.rope.scaling.type": "longrope"})


def llama3_divisors(theta, head_dim, factor, low, high, original):
    """Llama 3's published scaling, frequency by frequency."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_recognized_by_its_divisors(tmp_path):
    theta = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 32}
    divisors = llama3_divisors(500000.0, 32, 32.0, 1.0, 4.0, 8192)
    checkpoints.gguf_file(tmp_path / "a.gguf", metadata=theta, tensors={"rope_freqs.weight": divisors})
    scaling = locate(str(tmp_path / "a.gguf"), "auto", None, log=QUIET).model_config.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (
        "llama3",
        32,
        1,
        4,
    )
    assert scaling.original_max_position_embeddings == 8192
    other = llama3_divisors(500000.0, 32, 32.0, 1.0, 2.0, 8192)
    checkpoints.gguf_file(tmp_path / "b.gguf", metadata=theta, tensors={"rope_freqs.weight": other})
    with pytest.raises(ModelError, match="rope_freqs"):
        locate(str(tmp_path / "b.gguf"), "auto", None, log=QUIET)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"family": "llama", "pre": "martian"}, "pre-tokenizer 'martian'"),
        (
            {"family": "llama", "drop": ("model.layers.1.mlp.up_proj.weight",)},
            "lacks the tensor .*layers.1.mlp.up_proj",
        ),
        ({"family": "llama", "drop": ("model.embed_tokens.weight",)}, "no token embedding"),
        ({"family": "llama", "metadata": {"llama.block_count": 3}}, "lacks the tensor model.layers.2"),
        ({"family": "llama", "metadata": {"llama.feed_forward_length": 500}}, "has shape"),
        ({"family": "llama", "metadata": {"llama.block_count": None}}, "llama.block_count"),
        ({"family": "llama", "metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"family": "llama", "metadata": {"llama.rope.dimension_count": 16}}, "rope.dimension_count"),
        ({"family": "llama", "metadata": {"llama.attention.head_count": [8, 8]}}, "head_count must be one positive"),
        ({"family": "llama", "metadata": {"llama.attention.head_count_kv": 3}}, "cannot share"),
        ({"family": "llama", "metadata": {"split.count": 3}}, "split GGUF"),
        ({"family": "llama", "tensors": {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}}, "attn_sinks"),
        (
            {"family": "llama", "tensors": {"blk.0.attn_q.bias": np.ones(256, np.float32)}},
            "lacks the tensor .*k_proj.bias",
        ),
    ],
)
def test_a_gguf_that_would_be_served_wrong_is_refused(tmp_path, options, reason):
    checkpoints.gguf_file(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError, match=reason):
        locate(str(tmp_path / "m.gguf"), "auto", None, log=QUIET)


def test_unknown_architectures_and_tensor_types_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "rwkv6")
    checkpoints.add_byte_level_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'rwkv6'"):
        locate(str(path), "auto", None, log=QUIET)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros(16, np.uint8), raw_shape=(1, 66), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="tensor type 16"):
        locate(str(path), "auto", None, log=QUIET)


def test_end_of_turn_tokens_end_generation_too(tmp_path):
    checkpoints.gguf_file(
        tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 5}, drop=(), tie_word_embeddings=True
    )
    files = locate(str(tmp_path / "m.gguf"), "auto", None, log=QUIET)
    assert files.model_config.eos_token_ids == (2, 5)
    assert files.model_config.tie_word_embeddings


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    checkpoints.gguf_file(path, metadata={"tokenizer.chat_template": "first"})
    first = locate(str(path), "auto", None, log=QUIET)
    said = []
    assert locate(str(path), "auto", None, log=said.append) == first
    assert not said
    checkpoints.gguf_file(path, metadata={"tokenizer.chat_template": "second one"})
    second = locate(str(path), "auto", None, log=QUIET)
    assert second.folder != first.folder
    assert json.loads((second.folder / "tokenizer_config.json").read_text())["chat_template"] == "second one"


def test_named_templates_are_carried_over(tmp_path):
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    checkpoints.gguf_file(tmp_path / "m.gguf", metadata=metadata)
    files = locate(str(tmp_path / "m.gguf"), "auto", None, log=QUIET)
    assert json.loads((files.folder / "tokenizer_config.json").read_text())["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
