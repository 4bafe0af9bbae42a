"""Two ranks that share a model's weights, as real processes, against transformers' whole model."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import hf_model, our_config

from srt.model_config import ModelError
from srt.models.loader import load_model
from srt.parallel import ParallelContext

HERE = Path(__file__).parent


@pytest.mark.parametrize(("family", "tied"), [("llama-biases", False), ("qwen3", True)])
def test_two_ranks_compute_what_one_model_does(family, tied, tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [sys.executable, str(HERE / "parallel_worker.py"), family, "tied" if tied else "untied"]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(tmp_path)], env=env) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert torch.equal(first["logits"], second["logits"])
    assert first["tokens"] == second["tokens"]

    model = hf_model(family, tied=tied)
    expected = []
    for row in range(2):
        with torch.inference_mode():
            expected.append(model(torch.tensor([first["tokens"][row][:-1]])).logits[0, 16:])
    # Both rows reach their first token in the same step, and go on side by side.
    torch.testing.assert_close(first["logits"], torch.stack(expected, dim=1).flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_refuses_a_split_that_does_not_divide():
    config = dataclasses.replace(our_config(hf_model("llama")), num_heads=6)
    parallel = ParallelContext(0, 4, group=object())
    with pytest.raises(ModelError, match=r"--tp-size 4 does not divide the model's 6 heads"):
        load_model(config, [], torch.float32, torch.device("cpu"), parallel=parallel)
