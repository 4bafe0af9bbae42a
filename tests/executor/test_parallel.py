"""Two ranks that share a model's weights, as real processes, against transformers' whole model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from parallel_worker import LENGTHS, save_case
from shared.python_path import python_path
from tiny_models import hf_model, our_config

from srt.config import ConfigError
from srt.model_config import ModelError
from srt.models.loader import load_model
from srt.parallel import ParallelContext, check_alike, check_balance, fingerprint

HERE = Path(__file__).parent


def test_two_ranks_compute_what_one_model_does(tmp_path):
    """One case with biases and its own head, one with normalised queries and keys and a tied head, odd vocabulary, and
    one whose only KV head both ranks have."""
    models = {
        "llama-biases": hf_model("llama-biases"),
        "qwen3": hf_model("qwen3", tied=True),
        "llama": hf_model("llama", num_key_value_heads=1),
    }
    for family, model in models.items():
        save_case(tmp_path, family, our_config(model), model.state_dict())
    env = os.environ | {"PYTHONPATH": python_path(HERE.parents[1], HERE)}
    command = [sys.executable, str(HERE / "parallel_worker.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), "2"], env=env) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    heard = [json.loads((tmp_path / f"heard{rank}").read_text()) for rank in range(2)]
    assert heard == [{"gathered": [{"rank": 0}, {"rank": 1}], "lengths": list(LENGTHS)}] * 2
    for family, model in models.items():
        first, second = (torch.load(tmp_path / f"{family}.rank{rank}", weights_only=True) for rank in range(2))
        assert torch.equal(first["logits"], second["logits"])
        assert first["tokens"] == second["tokens"]
        expected = []
        for tokens in first["tokens"]:
            with torch.inference_mode():
                expected.append(model(torch.tensor([tokens[:-1]])).logits[0, 16:])
        # Both rows reach their first token in the same step, and go on side by side.
        torch.testing.assert_close(first["logits"], torch.stack(expected, dim=1).flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_refuses_a_split_that_does_not_divide():
    config = dataclasses.replace(our_config(hf_model("llama")), num_heads=6)
    parallel = ParallelContext(0, 4, group=object())
    with pytest.raises(ModelError, match=r"--tp-size 4 does not divide the model's 6 heads"):
        load_model(config, [], torch.float32, torch.device("cpu"), parallel=parallel)


def test_ranks_must_be_alike():
    own = fingerprint({"--page-size": "1"})
    assert own["llguidance"] == metadata.version("llguidance"), "grammars are a matter of libraries, too"
    check_alike([own, fingerprint({"--page-size": "1"})])
    for name in own:
        with pytest.raises(ConfigError, match=f"the {name} of rank 1 is other, of rank 0 "):
            check_alike([own, {**own, name: "other"}])


def test_free_memory_must_be_balanced():
    check_balance([1000, 900, 950])
    with pytest.raises(ConfigError, match=r"rank 1 has 0\.87 GiB of free memory and rank 2 1\.00 GiB"):
        check_balance([2**30 - 10, int(0.87 * 2**30), 2**30])


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "elements"), [(4, 1, 800), (4, 2, 400), (4, 4, 200), (4, 8, 200)]
)
def test_a_rank_stores_its_kv_heads(num_kv_heads, num_ranks, elements):
    config = dataclasses.replace(our_config(hf_model("llama")), num_kv_heads=num_kv_heads, num_layers=10, head_dim=10)
    assert config.kv_elements_per_rank(num_ranks) == elements
