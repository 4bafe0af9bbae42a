"""Traces of a real model's steps, and other weights for it."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from safetensors.torch import save_file
from step_driver import StepDriver
from test_models_against_transformers import GREEDY, greedy_reference, prompt_of
from tiny_models import VOCAB, hf_model, our_config

from srt.executor.maintenance import ModelMaintenance
from srt.executor.model_runner import ModelRunner
from srt.executor.shape import ExecutorShape
from srt.model_files import ModelFiles
from srt.models.loader import load_model
from srt.parallel import PAGE

CPU = torch.device("cpu")


class OtherRanks:
    """What they say when they are asked, behind what this one says."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        self.met = 0

    def gather(self, said):
        self.met += 1
        assert len(json.dumps(said)) <= PAGE
        return [said, *({"fault": fault} for fault in self.faults)]


def build(tmp_path, ranks=None):
    model = hf_model("llama")
    save(model, tmp_path / "old")
    config = our_config(model)

    def make_model(weights):
        return load_model(config, weights, torch.float32, CPU, context_length=128)

    ours = make_model(model.state_dict().items())
    runner = ModelRunner(ours, config, ExecutorShape(8, 128, 1024, 1, VOCAB, torch.float32, CPU))
    files = ModelFiles("tiny", tmp_path / "old", tmp_path, "safetensors", None, config)
    maintenance = ModelMaintenance(
        ours, files, torch.float32, CPU, ranks, "rank 0", make_model, runner.take_model
    )  # fmt: skip
    return model, StepDriver(runner, pool_tokens=1024, page_size=1), maintenance


def save(model, folder):
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, folder / "model.safetensors")


def other_model(tmp_path):
    model = hf_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    save(model, tmp_path / "new")
    return model


def test_other_weights(tmp_path):
    old, driver, maintenance = build(tmp_path, OtherRanks(""))
    new, prompt = other_model(tmp_path), prompt_of(9, seed=1)
    assert driver.generate([driver.tenant(0, prompt, GREEDY)], 6) == [greedy_reference(old, prompt, 6)]
    assert maintenance.update_weights(str(tmp_path / "new")) == ""
    assert driver.generate([driver.tenant(1, prompt, GREEDY)], 6) == [greedy_reference(new, prompt, 6)]
    assert greedy_reference(old, prompt, 6) != greedy_reference(new, prompt, 6)
    assert maintenance.update_weights(None) == ""
    assert driver.generate([driver.tenant(2, prompt, GREEDY)], 6) == [greedy_reference(old, prompt, 6)]


@pytest.mark.parametrize("whose", ["own", "another"])
def test_all_ranks_take_them_or_none(tmp_path, whose):
    old, driver, maintenance = build(tmp_path, OtherRanks("rank 1: no disk" if whose == "another" else ""))
    other_model(tmp_path)
    if whose == "own":
        (tmp_path / "new" / "model.safetensors").write_bytes(b"nothing")
    fault = maintenance.update_weights(str(tmp_path / "new"))
    assert ("rank 0" if whose == "own" else "rank 1: no disk") in fault
    prompt = prompt_of(9, seed=1)
    assert driver.generate([driver.tenant(0, prompt, GREEDY)], 6) == [greedy_reference(old, prompt, 6)]


def test_other_ranks_hear_of_a_fault_in_any_script(tmp_path):
    _, _, maintenance = build(tmp_path, OtherRanks(""))
    assert "🗻" in maintenance.update_weights(str(tmp_path / "/".join(["🗻" * 60] * 15)))


def test_a_trace(tmp_path):
    _, driver, maintenance = build(tmp_path)
    tenant = driver.tenant(0, prompt_of(9, seed=1), GREEDY)
    assert "No profile" in maintenance.stop_profile()
    assert maintenance.start_profile(str(tmp_path / "a"), 3) == ""
    assert "already" in maintenance.start_profile(str(tmp_path / "b"), 3)
    for _ in range(3):
        driver.step([tenant])
        maintenance.step()
    events = json.loads(gzip.decompress((tmp_path / "a" / "rank-0.trace.json.gz").read_bytes()))["traceEvents"]
    assert any("aten::" in event["name"] for event in events)
    assert "No profile" in maintenance.stop_profile(), "it was bounded"
    maintenance.start_profile(str(tmp_path / "a" / "rank-0.trace.json.gz" / "under a file"), 3)
    assert "could not be written" in maintenance.stop_profile()


def test_ranks_begin_and_end_a_trace_together(tmp_path):
    """One whose disk is slow would otherwise stand still in a step that the others have left."""
    ranks = OtherRanks("")
    _, _, maintenance = build(tmp_path, ranks)
    maintenance.start_profile(str(tmp_path / "a"), 3)
    assert maintenance.stop_profile() == ""
    assert ranks.met == 2
    ranks.faults = ("The profile of rank 1 could not be written: no space",)
    maintenance.start_profile(str(tmp_path / "b"), 3)
    assert "rank 1" in maintenance.stop_profile()
