"""Log-probabilities of a whole engine, ledger and scheduler included, against transformers', in float32."""

from __future__ import annotations

import pytest
import torch
from shared.fakes import RecordingOutlet, ScriptedIntake
from tiny_models import VOCAB, hf_model, our_config

from srt.executor.model_runner import ModelRunner
from srt.executor.shape import ExecutorShape
from srt.messages import NewRequest, SamplingParams, pack_ids
from srt.models.loader import load_model
from srt.scheduler.assembly import Settings, assemble

CPU = torch.device("cpu")
CONTEXT, POOL = 128, 512


class Gauges:
    def step(self, decision):
        pass

    def gauges(self, **values):
        pass


def serve(model, script, *, page_size=1, budget=7):
    """What the engine says to requests that come one batch a step, whose prompts go in chunks of `budget` tokens."""
    config = our_config(model)
    ours = load_model(config, model.state_dict().items(), torch.float32, CPU, context_length=CONTEXT)
    shape = {"num_rows": 4, "context_length": CONTEXT, "pool_tokens": POOL, "page_size": page_size}
    runner = ModelRunner(
        ours, config, ExecutorShape(**shape, num_tokens_vocab=VOCAB, kv_dtype=torch.float32, device=CPU)
    )
    outlet, intake = RecordingOutlet(), ScriptedIntake(script, 1000)
    settings = Settings(
        num_pages=POOL // page_size, page_size=page_size, num_rows=4, context_length=CONTEXT, cache_enabled=True,
        policy="lpm", low_priority_first=False, token_budget=budget, overlap=True, eos_token_ids=(),
        token_bytes=(b"x",) * VOCAB, is_special=bytes(VOCAB),
    )  # fmt: skip
    scheduler = assemble(settings, executor=runner, intake=intake, outlet=outlet, record=Gauges())
    intake.stop = lambda: setattr(scheduler, "stopped", True)
    scheduler.run()
    return outlet


def reference(model, tokens):
    """[positions, vocabulary]: what rates the token behind each position."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check(said, expected_PV, tokens, num_top, ids):
    """`said` of `tokens`, which stand behind the expected positions."""
    chosen = expected_PV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(said.chosen), chosen, atol=1e-3, rtol=0)
    best = expected_PV.topk(num_top)
    torch.testing.assert_close(torch.tensor(said.top), best.values, atol=1e-3, rtol=0)
    found = expected_PV.gather(1, torch.tensor(said.top_ids))
    torch.testing.assert_close(found, best.values, atol=1e-3, rtol=0)
    if ids:
        torch.testing.assert_close(torch.tensor(said.asked), expected_PV[:, list(ids)], atol=1e-3, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompt_and_output_with_cache_hits_and_chunks(page_size):
    model = hf_model("llama")
    prompt = torch.randint(0, VOCAB, (61,), generator=torch.Generator().manual_seed(1)).tolist()
    # Position 300 does not exist; of the fourth only the prompt is wanted.
    wishes = [(20, 0, (), 5), (3, 40, (7, 150), 4), (0, 300, (), 3), (20, 33, (5,), 0)]
    script = {}
    for rid, (num_top, start, ids, count) in enumerate(wishes):
        sampling = SamplingParams(
            count, temperature=0.0, logprobs=num_top, prompt_logprobs=num_top, prompt_logprobs_start=start,
            logprob_ids=ids,
        )  # fmt: skip
        script[1 + 60 * min(rid, 2)] = [
            *script.get(1 + 60 * min(rid, 2), ()),
            NewRequest(rid, pack_ids(prompt), sampling),
        ]
    outlet = serve(model, script, page_size=page_size)
    for rid, (num_top, start, ids, count) in enumerate(wishes):
        output = outlet.outputs[rid]
        assert len(output) == count
        expected = reference(model, prompt + output)
        deltas = outlet.deltas[rid]
        start = max(start, 1)
        if start < len(prompt):
            check(deltas[0].prompt_logprobs, expected[start - 1 : len(prompt) - 1], prompt[start:], num_top, ids)
        else:
            assert deltas[0].prompt_logprobs is None
        for at, delta in enumerate(deltas[:count]):
            place = len(prompt) + at
            check(delta.logprobs, expected[place - 1 : place], output[at : at + 1], num_top, ids)
    cached = [outlet.openings[rid].cached_tokens for rid in range(4)]
    assert cached == ([0, 39, 60, 32] if page_size == 1 else [0, 32, 48, 32])
