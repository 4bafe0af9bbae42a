"""K/V in host memory: an answer is the same whether its prefix was kept, computed again, or copied there and back."""

from __future__ import annotations

import random

import pytest
import torch
from shared.fakes import RecordingOutlet, ScriptedIntake
from tiny_models import VOCAB, hf_model, our_config

from srt.executor.model_runner import ModelRunner
from srt.executor.restore_cost import NEVER, least_worth_copying, restore_least
from srt.executor.shape import ExecutorShape
from srt.messages import NewRequest, SamplingParams, pack_ids
from srt.models.loader import load_model
from srt.scheduler.assembly import Settings, assemble

CONTEXT, POOL, ROWS = 128, 256, 2
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class NoRecord:
    def step(self, decision: object) -> None:
        pass

    def gauges(self, **values: int) -> None:
        pass


def make_runner(model, page_size: int, host_tokens: int, device: torch.device):
    config = our_config(model)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ours = load_model(config, model.state_dict().items(), dtype, device, context_length=CONTEXT)
    shape = ExecutorShape(
        num_rows=ROWS,
        context_length=CONTEXT,
        pool_tokens=POOL,
        page_size=page_size,
        num_tokens_vocab=VOCAB,
        kv_dtype=dtype,
        device=device,
        host_tokens=host_tokens,
    )
    if device.type == "cpu":
        return ModelRunner(ours, config, shape)
    from srt.executor.cuda_runner import CudaRunner

    runner = CudaRunner(ours, config, shape, most_tokens=256)
    runner.warm_up()
    return runner


def answers(runner, page_size: int, host_tokens: int) -> RecordingOutlet:
    """Seven prompts, three times each, in a pool for two of them."""
    rnd = random.Random(11)
    prompts = [pack_ids([rnd.randrange(VOCAB) for _ in range(90)]) for _ in range(7)]
    requests = [NewRequest(rid, prompts[rid % 7], SamplingParams(8, **GREEDY)) for rid in range(21)]
    outlet = RecordingOutlet()
    intake = ScriptedIntake({1: requests[:7], 300: requests[7:14], 600: requests[14:]}, 1000)
    settings = Settings(
        num_pages=POOL // page_size,
        page_size=page_size,
        num_rows=ROWS,
        context_length=CONTEXT,
        cache_enabled=True,
        policy="fcfs",
        low_priority_first=False,
        token_budget=64,
        overlap=True,
        eos_token_ids=(),
        token_bytes=(b"x",) * VOCAB,
        is_special=bytes(VOCAB),
        host_pages=host_tokens // page_size,
    )
    scheduler = assemble(settings, executor=runner, intake=intake, outlet=outlet, record=NoRecord())
    intake.stop = lambda: setattr(scheduler, "stopped", True)
    scheduler.run()
    return outlet


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_answers_are_those_without_host_memory(page_size, device):
    sizes = {} if device == "cpu" else {"hidden_size": 384, "intermediate_size": 512, "head_dim": 64}
    model = hf_model("llama", **sizes).to(device)
    with_host, without = (
        answers(make_runner(model, page_size, host_tokens, torch.device(device)), page_size, host_tokens)
        for host_tokens in (1024, 0)
    )
    again = [with_host.openings[rid] for rid in range(7, 21)]
    assert sum(opening.restored_tokens for opening in again) > 7 * 80
    assert all(opening.cached_tokens >= 80 for opening in again)
    assert with_host.outputs == without.outputs


def test_the_cost_is_measured_on_the_executor_itself():
    runner = make_runner(hf_model("llama"), 16, 64, torch.device("cpu"))
    assert 1 <= restore_least(runner, 64, 16) <= NEVER


@pytest.mark.parametrize(
    ("fixed", "copying", "computing", "least"), [(0, 1, 10, 1), (90, 1, 10, 11), (89, 1, 10, 10), (1, 3, 3, NEVER)]
)
def test_the_least_that_is_worth_copying(fixed, copying, computing, least):
    assert least_worth_copying(fixed, copying, computing) == least
    if least < NEVER:
        assert fixed + least * copying < least * computing
        assert least == 1 or fixed + (least - 1) * copying >= (least - 1) * computing
