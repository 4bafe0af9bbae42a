"""Flags in, one frozen configuration out, the same in every process."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import resolve
from srt.config import ConfigError, KvEventsConfig, ServerConfig, flag_name, parse_args, split_address
from srt.model_config import ModelConfig
from srt.process import ChildSpec
from srt.transport import Endpoints

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
)


def test_without_flags_everything_has_its_default():
    assert parse_args([]) == ServerConfig()


def test_each_flag_reaches_its_field():
    given_values = {
        "model_path": "/models/x",
        "tokenizer_path": "/models/y",
        "served_model_name": "chat",
        "host": "0.0.0.0",
        "port": 8000,
        "http_workers": 3,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "fp8_e4m3",
        "load_format": "dummy",
        "context_length": 4096,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 10_000,
        "max_running_requests": 16,
        "max_queued_requests": 0,
        "waiting_timeout": 2.5,
        "chunked_prefill_size": 512,
        "page_size": 16,
        "schedule_policy": "priority",
        "schedule_low_priority_values_first": True,
        "cache_isolation": "api-key",
        "disable_radix_cache": True,
        "hierarchical_cache_gb": 2.5,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "tp_size": 2,
        "nnodes": 2,
        "node_rank": 1,
        "dist_init_addr": "10.0.0.1:5000",
        "dp_size": 2,
        "load_balance_method": "round_robin",
        "watchdog_timeout": 60.0,
        "random_seed": 7,
        "api_key": "secret,other",
        "admin_api_key": "root",
        "ssl_certfile": "/t.pem",
        "ssl_keyfile": "/t.key",
        "cors_origins": "https://a.example, https://b.example",
        "max_body_size": 1000,
        "sampling_defaults": "openai",
        "incremental_streaming_output": True,
        "chat_template": "/t.jinja",
        "tool_call_parser": "hermes",
        "reasoning_parser": "none",
        "kv_events_config": '{"topic": "kv"}',
        "inbox_log": "/t.log",
        "metrics_names": "vllm,sglang",
        "otlp_traces_endpoint": "http://c:4318/v1/traces",
        "page_show_text": True,
        "log_format": "json",
        "log_level": "debug",
    }
    assert list(given_values) == [spec.name for spec in dataclasses.fields(ServerConfig)]
    argv = []
    for name, value in given_values.items():
        argv += [flag_name(name)] if value is True else [flag_name(name), str(value)]
    assert parse_args(argv) == ServerConfig(**given_values)


def test_tp_is_short_for_tp_size():
    assert parse_args(["--tp", "4"]).tp_size == 4


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "-1"], "--port"),
        (["--port", "65536"], "--port"),
        (["--context-length", "1"], "--context-length"),
        (["--max-total-tokens", "0"], "--max-total-tokens"),
        (["--max-running-requests", "0"], "--max-running-requests"),
        (["--max-queued-requests", "-1"], "--max-queued-requests"),
        (["--waiting-timeout", "0"], "--waiting-timeout"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size"),
        (["--page-size", "0"], "--page-size"),
        (["--tp-size", "0"], "--tp-size"),
        (["--nnodes", "0"], "--nnodes"),
        (["--nnodes", "2"], "--dist-init-addr HOST:PORT"),
        (["--node-rank", "-1"], "--node-rank"),
        (["--node-rank", "1"], "below --nnodes 1"),
        (["--dist-init-addr", "10.0.0.1"], "--dist-init-addr"),
        (["--dist-init-addr", "10.0.0.1:0"], "--dist-init-addr"),
        (["--dist-init-addr", ":5000"], "--dist-init-addr"),
        (["--dist-init-addr", "0.0.0.0:5000"], "address of node 0"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static"),
        (["--mem-fraction-static", "1.0"], "--mem-fraction-static"),
        (["--mem-fraction-static", "nan"], "--mem-fraction-static"),
        (["--max-body-size", "0"], "--max-body-size"),
        (["--hierarchical-cache-gb", "-1.5"], "--hierarchical-cache-gb"),
        (["--hierarchical-cache-gb", "inf"], "--hierarchical-cache-gb"),
        (["--random-seed", "-1"], "--random-seed"),
        (["--random-seed", str(2**63)], "--random-seed"),
    ],
)
def test_a_value_out_of_range_is_one_sentence_that_names_the_flag(argv, named):
    with pytest.raises(ConfigError, match=named) as caught:
        parse_args(argv)
    assert "\n" not in str(caught.value)
    assert argv[1].removesuffix(".0") in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--api-key", ""], "--api-key"),
        (["--api-key", "one,"], "--api-key"),
        (["--admin-api-key", ""], "--admin-api-key"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile"),
        (["--cache-isolation", "api-key", "--api-key", "one"], "--cache-isolation"),
        (["--schedule-low-priority-values-first"], "--schedule-low-priority-values-first"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_that_names_the_flag(argv, named):
    with pytest.raises(ConfigError, match=named) as caught:
        parse_args(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [["--no-such-flag"], ["--port", "http"], ["--device", "tpu"], ["--load-format", "pt"], ["positional"], ["--host"]],
)
def test_what_is_no_flag_or_no_value_is_one_sentence_that_names_it(argv):
    with pytest.raises(ConfigError, match=argv[0]) as caught:
        parse_args(argv)
    assert "\n" not in str(caught.value)


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [spec.name for spec in dataclasses.fields(ServerConfig) if flag_name(spec.name) not in text] == []


@given(
    st.builds(
        ServerConfig,
        model_path=st.none() | st.text(),
        port=st.integers(0, 65535),
        mem_fraction_static=st.none() | st.floats(0.01, 0.99),
        max_total_tokens=st.none() | st.integers(1, 2**40),
        random_seed=st.none() | st.integers(0, 2**63 - 1),
        disable_radix_cache=st.booleans(),
        api_key=st.none() | st.text(min_size=1).filter(lambda key: "," not in key),
    )
)
def test_a_child_is_told_it_unchanged(config):
    spec = ChildSpec("scheduler 1", config, Endpoints("/tmp/x"), MODEL, "/models/é", "/models/t", "gguf", None, 1)
    told = ChildSpec.from_json(spec.to_json())
    assert told == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", "JSON object"),
        ('{"endpoint": 5557}', "endpoint"),
        ('{"endpoints": "tcp://*:5557"}', "endpoints"),
        ('{"endpoint": "tcp://*"}', r"tcp://\*:PORT"),
        ('{"replay_endpoint": "here"}', "here"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_kv_events_that_cannot_be_are_refused(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_args(["--kv-events-config", text])
    assert "--kv-events-config" in str(caught.value)


def test_kv_events_of_engines_need_ports_of_their_own():
    def config(replay: int, dp_size: int, endpoint: str = "tcp://*:5557") -> ServerConfig:
        text = f'{{"endpoint": "{endpoint}", "replay_endpoint": "tcp://*:{replay}"}}'
        return parse_args(["--kv-events-config", text, "--dp-size", str(dp_size)])

    config(5558, 1)
    config(5559, 2)
    config(5557, 2, "tcp://elsewhere:5557")  # which is not bound here
    for replay, dp_size, place in ((5558, 2, 5558), (5557, 1, 5557), (5560, 4, 5560), (5554, 4, 5557)):
        with pytest.raises(ConfigError, match=rf"--kv-events-config: tcp://\*:{place} would be taken twice"):
            config(replay, dp_size)
    with pytest.raises(ConfigError, match="tcp://\\*:65536 has a port above 65535"):
        config(65535, 2)


def test_kv_events_are_on_unless_they_are_switched_off():
    assert ServerConfig().kv_events is None
    assert ServerConfig(kv_events_config='{"enable_kv_cache_events": false}').kv_events is None
    assert ServerConfig(kv_events_config='{"publisher": "null"}').kv_events is None
    assert ServerConfig(kv_events_config="{}").kv_events.endpoint == "tcp://*:5557"


def test_kv_events_need_pages_of_some_size():
    with pytest.raises(ConfigError, match="--page-size 16 or more, not 8"):
        parse_args(["--kv-events-config", "{}", "--page-size", "8"])
    assert parse_args(["--kv-events-config", '{"publisher": "null"}', "--page-size", "8"]).page_size == 8
    for flags, size in (([], 1), (["--kv-events-config", "{}"], 16), (["--page-size", "64"], 64)):
        assert resolve(parse_args(flags), MODEL, 0).page_size == size


def test_each_engine_publishes_at_an_address_of_its_own():
    config = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/replay")
    assert [config.endpoint_of(rank) for rank in range(3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert [config.replay_endpoint_of(rank) for rank in (0, 2)] == ["ipc:///tmp/replay", "ipc:///tmp/replay_dp2"]
    binds = {
        "tcp://*:1": True,
        "tcp://[::]:1": True,
        "tcp://0.0.0.0:1": True,
        "ipc:///x": True,
        "tcp://router:1": False,
    }
    assert {endpoint: KvEventsConfig(endpoint=endpoint).binds for endpoint in binds} == binds


def test_what_ranks_must_share_hides_the_key_and_fits_a_page():
    plain = ServerConfig()
    for own in ({"api_key": "secret"}, {"host": "10.0.0.2"}, {"port": 1}):
        assert ServerConfig(**own).shared() == plain.shared()
    for change in ({"page_size": 2}, {"random_seed": 1}, {"disable_overlap_schedule": True}, {"model_path": "x"}):
        (name,) = change
        changed = ServerConfig(**change).shared()
        assert [flag for flag, value in plain.shared().items() if changed[flag] != value] == [flag_name(name)]
    nodes = [ServerConfig(tp_size=4, nnodes=2, node_rank=rank, dist_init_addr="a:1") for rank in range(2)]
    assert nodes[0].shared() == nodes[1].shared()
    long = ["/" + "x" * 4000 + end for end in "ab"]
    configs = [ServerConfig(model_path=path, tokenizer_path=path, chat_template=path) for path in long]
    assert configs[0].shared()["--model-path"] != configs[1].shared()["--model-path"]
    assert len(json.dumps(configs[0].shared())) < 3000


def test_ranks_are_spread_evenly_over_nodes():
    nodes = [ServerConfig(tp_size=6, nnodes=3, node_rank=rank, dist_init_addr="a:1") for rank in range(3)]
    assert [rank for node in nodes for rank in node.node_ranks] == list(range(6))


def test_an_address_may_be_of_version_6():
    assert split_address("[fd00::1]:5000") == ("fd00::1", 5000)
    assert split_address("10.0.0.1:5000") == ("10.0.0.1", 5000)


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1
