"""config.json to numbers, against transformers' own configuration classes."""

import json

import pytest
import transformers

from srt.model_config import ROPE_TYPES, ModelConfig, ModelError, RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_families_as_transformers_saves_them(tmp_path, family):
    settings = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24 if family in ("mistral", "qwen3") else 8,
        "max_position_embeddings": 300,
        "tie_word_embeddings": family == "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings))
    reference.save_pretrained(tmp_path)
    found = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    config = reference.config
    assert found.architecture == type(reference).__name__
    assert found.model_type == family
    for ours, theirs in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
        ("max_position_embeddings", "max_position_embeddings"),
    ):
        assert getattr(found, ours) == getattr(config, theirs), ours
    attention = reference.model.layers[0].self_attn
    assert found.head_dim == attention.head_dim
    assert found.qkv_bias == (attention.q_proj.bias is not None)
    assert found.output_bias == (attention.o_proj.bias is not None)
    assert found.mlp_bias == (reference.model.layers[0].mlp.up_proj.bias is not None)
    assert found.qk_norm == hasattr(attention, "q_norm")
    assert found.rope_theta == 5000.0
    assert found.rope_scaling == RopeScaling(original_max_position_embeddings=300)
    assert found.kv_elements_per_token == 2 * 3 * 2 * found.head_dim


def test_defaults_of_old_checkpoints():
    config = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
    found = ModelConfig.from_hf({**config, "head_dim": None, "rope_scaling": None, "rope_theta": 500000})
    assert (found.num_kv_heads, found.head_dim, found.rope_theta, found.rms_norm_eps) == (8, 8, 500000.0, 1e-6)
    assert found.dtype == "bfloat16"


def test_biases():
    found = ModelConfig.from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert found.qkv_bias
    assert found.output_bias
    assert found.mlp_bias


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "linear", "factor": 4}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (LLAMA3_ROPE, 2048),
        ({"rope_type": "default"}, 2048),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_and_the_context_it_gives(scaling, context, key):
    value = {**scaling, "rope_theta": 777.0} if key == "rope_parameters" else scaling
    found = ModelConfig.from_hf({**LLAMA, key: value, **({} if key == "rope_parameters" else {"rope_theta": 777.0})})
    assert found.rope_theta == 777.0
    assert found.rope_scaling.rope_type == scaling.get("rope_type", scaling.get("type"))
    assert found.rope_scaling.factor == scaling.get("factor", 1.0)
    assert found.max_position_embeddings == context
    assert found.rope_scaling.original_max_position_embeddings == scaling.get("original_max_position_embeddings", 2048)
    assert found.rope_scaling.rope_type in ROPE_TYPES


def test_rope_scaling_added_to_a_config_with_rope_parameters_decides():
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    found = ModelConfig.from_hf({**LLAMA, **both})
    assert (found.rope_scaling.rope_type, found.rope_scaling.factor, found.rope_theta) == ("linear", 2.0, 777.0)


def test_details_of_yarn_are_kept():
    scaling = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "mscale": 0.7, "attention_factor": 1.2}
    found = ModelConfig.from_hf({**LLAMA, "rope_scaling": {**scaling, "truncate": False}}).rope_scaling
    assert (found.beta_fast, found.mscale, found.attention_factor, found.truncate) == (16.0, 0.7, 1.2, False)


@pytest.mark.parametrize(
    ("architecture", "settings", "context"),
    [
        ("MistralForCausalLM", {"sliding_window": 512}, 512),
        ("MistralForCausalLM", {"sliding_window": None}, 2048),
        ("MistralForCausalLM", {"sliding_window": 4096}, 2048),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": False}, 2048),
        ("Qwen2ForCausalLM", {"sliding_window": 512}, 2048),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": True}, 512),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": False}, 2048),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
            2048,
        ),
        ("LlamaForCausalLM", {"sliding_window": 512}, 2048),
    ],
)
def test_a_sliding_window_in_use_bounds_the_context(architecture, settings, context):
    config = {**LLAMA, "architectures": [architecture], **settings}
    assert ModelConfig.from_hf(config).max_position_embeddings == context


def test_every_way_to_end_is_kept_in_order():
    found = ModelConfig.from_hf(LLAMA, {"eos_token_id": [9, 8], "bos_token_id": 5})
    assert found.eos_token_ids == (9, 8, 2)
    assert found.bos_token_id == 5
    nothing = ModelConfig.from_hf({**LLAMA, "eos_token_id": None, "bos_token_id": None})
    assert nothing.eos_token_ids == ()
    assert nothing.bos_token_id is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM"),
        ({"architectures": []}, "model_type 'llama' without `architectures`"),
        ({"architectures": "LlamaForCausalLM"}, "list of names"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized with 'awq'"),
        ({"quantization_config": "gptq"}, "quantized with 'gptq'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope'"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope type 'su'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "kinds of layers"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks high_freq_factor, low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be"),
        ({"rope_theta": float("inf")}, "rope_theta must be"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_what_would_be_served_wrong_is_refused(changes, reason):
    with pytest.raises(ModelError, match=reason):
        ModelConfig.from_hf({**LLAMA, **changes})
