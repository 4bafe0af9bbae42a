"""The flags are frozen here: a new one, or a new default, is a decision that shows in a diff of this table."""

import dataclasses
import re

from source_tree import ROOT

from srt.config import ServerConfig, flag_name

FLAGS = {
    "model_path": ("str | None", None),
    "tokenizer_path": ("str | None", None),
    "served_model_name": ("str | None", None),
    "host": ("str", "127.0.0.1"),
    "port": ("int", 30000),
    "http_workers": ("int", 1),
    "device": ("str", "auto"),
    "dtype": ("str", "auto"),
    "kv_cache_dtype": ("str", "auto"),
    "load_format": ("str", "auto"),
    "context_length": ("int | None", None),
    "mem_fraction_static": ("float | None", None),
    "max_total_tokens": ("int | None", None),
    "max_running_requests": ("int | None", None),
    "max_queued_requests": ("int | None", None),
    "waiting_timeout": ("float | None", None),
    "chunked_prefill_size": ("int | None", None),
    "page_size": ("int | None", None),
    "schedule_policy": ("str", "lpm"),
    "schedule_low_priority_values_first": ("bool", False),
    "cache_isolation": ("str", "none"),
    "disable_radix_cache": ("bool", False),
    "hierarchical_cache_gb": ("float", 0.0),
    "disable_cuda_graph": ("bool", False),
    "disable_overlap_schedule": ("bool", False),
    "tp_size": ("int", 1),
    "nnodes": ("int", 1),
    "node_rank": ("int", 0),
    "dist_init_addr": ("str | None", None),
    "dp_size": ("int", 1),
    "load_balance_method": ("str", "cache_aware"),
    "watchdog_timeout": ("float", 300.0),
    "random_seed": ("int | None", None),
    "api_key": ("str | None", None),
    "admin_api_key": ("str | None", None),
    "ssl_certfile": ("str | None", None),
    "ssl_keyfile": ("str | None", None),
    "cors_origins": ("str | None", None),
    "max_body_size": ("int | None", None),
    "sampling_defaults": ("str", "model"),
    "incremental_streaming_output": ("bool", False),
    "chat_template": ("str | None", None),
    "tool_call_parser": ("str", "auto"),
    "reasoning_parser": ("str", "auto"),
    "kv_events_config": ("str | None", None),
    "inbox_log": ("str | None", None),
    "metrics_names": ("str", "lockstep,sglang"),
    "otlp_traces_endpoint": ("str | None", None),
    "page_show_text": ("bool", False),
    "log_format": ("str", "text"),
    "log_level": ("str", "info"),
}
"""Field of ServerConfig -> (type, default)."""

ALIASES = {"tp_size": ("--tp",), "dp_size": ("--dp",)}


def test_the_flags_are_these():
    assert {spec.name: (spec.type, spec.default) for spec in dataclasses.fields(ServerConfig)} == FLAGS


def test_the_aliases_are_these():
    aliases = {spec.name: spec.metadata["aliases"] for spec in dataclasses.fields(ServerConfig)}
    assert {name: names for name, names in aliases.items() if names} == ALIASES


def test_each_flag_has_a_line_of_help():
    for spec in dataclasses.fields(ServerConfig):
        text = spec.metadata["help"]
        assert text
        assert "\n" not in text
        assert not text.endswith(".")


def test_the_readme_lists_every_flag_and_no_other():
    table = (ROOT / "README.md").read_text().partition("\n## Flags\n")[2].partition("\n## ")[0]
    first_column = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    listed = re.findall("`(.+?)`", first_column)
    assert sorted(listed) == sorted([*map(flag_name, FLAGS), *(alias for names in ALIASES.values() for alias in names)])
