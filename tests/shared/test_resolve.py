"""What the user left open, and what the model and the hosts do not allow."""

from __future__ import annotations

import pytest
from shared.test_config import MODEL

from launch import raise_descriptor_limit, resolve
from srt.config import ConfigError, ServerConfig


def config(size, nodes):
    return ServerConfig(device="cpu", tp_size=size, nnodes=nodes, dist_init_addr="10.0.0.1:5000")


def test_narrow_kv_is_for_gpus():
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 is for GPUs; on a CPU leave it out"):
        resolve(ServerConfig(device="cpu", kv_cache_dtype="fp8_e4m3"), MODEL, 0)


def test_host_memory_that_no_host_has_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="--hierarchical-cache-gb: 2e.06 GiB in all are above"):
        resolve(ServerConfig(device="cpu", dp_size=2, hierarchical_cache_gb=1e6), MODEL, 0)


@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_ranks_that_share_evenly_are_served(size, nodes):
    assert resolve(config(size, nodes), MODEL, 0).ranks_per_node == size // nodes


@pytest.mark.parametrize(
    ("size", "nodes", "words"),
    [
        (3, 1, "--tp-size 3 does not divide the model's 4 heads, .*; sizes that do: 1, 2, 4$"),
        (3, 2, "--tp-size 3 does not divide the model's 4 heads, .*; sizes that do: 2, 4$"),
        (1, 2, "--tp-size 1 does not spread evenly over --nnodes 2; sizes that do: 2, 4$"),
        (2, 4, "--tp-size 2 does not spread evenly over --nnodes 4; sizes that do: 4$"),
        (4, 3, "--tp-size 4 does not spread evenly over --nnodes 3; no size does$"),
    ],
)
def test_the_sizes_that_would_do_are_named(size, nodes, words):
    with pytest.raises(ConfigError, match=words):
        resolve(config(size, nodes), MODEL, 0)


def test_a_process_may_have_enough_files_open(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (32, 32))
    with pytest.raises(ConfigError, match="32 files .*ulimit -n"):
        raise_descriptor_limit()
