"""Our models against transformers' on the same random weights, in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from step_driver import StepDriver
from tiny_models import FAMILIES, ROPES, VOCAB, hf_model, our_config

from srt.executor.model_runner import ModelRunner
from srt.executor.shape import ExecutorShape
from srt.messages import SamplingParams
from srt.model_config import ARCHITECTURES, ModelError
from srt.models import MODELS
from srt.models.loader import load_model
from srt.scheduler.schedule_batch import ScheduleBatch

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=1000, temperature=0.0)


def build(model, *, page_size=1, pool_tokens=1024, num_rows=8, context_length=128, spy=None):
    config = our_config(model)
    ours = load_model(config, model.state_dict().items(), torch.float32, CPU, context_length=context_length)
    if spy is not None:
        head = ours.logits
        ours.logits = lambda x: spy.append(head(x).clone()) or spy[-1].clone()
    runner = ModelRunner(
        ours,
        config,
        ExecutorShape(
            num_rows=num_rows,
            context_length=context_length,
            pool_tokens=pool_tokens,
            page_size=page_size,
            num_tokens_vocab=VOCAB,
            kv_dtype=torch.float32,
            device=CPU,
        ),
    )
    return StepDriver(runner, pool_tokens=pool_tokens, page_size=page_size)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def all_logits(driver: StepDriver, tokens: list[int]) -> None:
    """One step over the whole prompt with logits of every position."""
    tenant = driver.tenant(0, tokens, SamplingParams(1, temperature=0.0, prompt_logprobs=0))
    batch, _ = driver.plan([tenant], len(tokens))
    fields = {name: getattr(batch, name) for name in ScheduleBatch.__slots__}
    wanted = ScheduleBatch(**fields | {"first_logit": batch.start})
    launched = driver.runner.forward(wanted)
    driver.runner.sample(launched, None)
    driver.runner.result(launched)


CASES = [(family, "default", tied) for family in FAMILIES for tied in (False, True)]
CASES += [("llama", rope, False) for rope in ROPES if rope != "default"]
CASES += [("qwen3", "yarn", True), ("qwen2", "dynamic", False)]


@pytest.mark.parametrize(("family", "rope", "tied"), CASES)
def test_logits_of_every_position(family, rope, tied):
    model = hf_model(family, rope=rope, tied=tied)
    tokens = prompt_of(61, seed=1)
    spy: list[torch.Tensor] = []
    all_logits(build(model, spy=spy), tokens)
    torch.testing.assert_close(torch.cat(spy), reference_logits(model, tokens), atol=1e-4, rtol=1e-4)


def test_dynamic_rope_takes_the_base_of_the_served_context():
    model = hf_model("llama", rope="dynamic", max_position_embeddings=32)
    tokens = prompt_of(96, seed=2)
    spy: list[torch.Tensor] = []
    all_logits(build(model, spy=spy, context_length=96), tokens)
    torch.testing.assert_close(torch.cat(spy), reference_logits(model, tokens), atol=1e-4, rtol=1e-4)


def greedy_reference(model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rows_join_leave_and_share(family, page_size):
    """Chunks of 7 mixed with decode rows, scrambled slots, a cache hit, a row whose table row had an earlier tenant."""
    model = hf_model(family)
    driver = build(model, page_size=page_size)
    first = driver.tenant(3, prompt_of(23, seed=3), GREEDY)
    second = driver.tenant(0, prompt_of(41, seed=4), GREEDY)
    for _ in range(2):
        driver.step([first], chunk=7)
    for _ in range(5):
        driver.step([first, second], chunk=7)
    driver.generate([first, second], 6, chunk=7)
    sharing = driver.tenant(5, second.tokens[:32] + prompt_of(9, seed=5), GREEDY)
    driver.share(sharing, second, 32)
    successor = driver.tenant(3, prompt_of(11, seed=6), GREEDY)
    driver.generate([second, sharing, successor], 12, chunk=7)
    for tenant in (first, second, sharing, successor):
        assert tenant.output == greedy_reference(model, tenant.tokens[: tenant.prompt_len], len(tenant.output))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_reads_what_another_computes_in_the_same_step(page_size):
    """Twins, a longer prompt and a decode row beside the one that brings their head."""
    model = hf_model("llama")
    driver = build(model, page_size=page_size)
    decoding = driver.tenant(4, prompt_of(5, seed=1), GREEDY)
    driver.step([decoding])
    first = driver.tenant(0, prompt_of(33, seed=2), GREEDY)
    twin = driver.tenant(1, first.tokens, GREEDY)
    longer = driver.tenant(2, first.tokens[:32] + prompt_of(9, seed=3), GREEDY)
    for tenant in (twin, longer):
        driver.share(tenant, first, 32, in_step=True)
    tenants = [decoding, first, twin, longer]
    driver.step(tenants)
    driver.generate(tenants, 6)
    assert twin.output == first.output
    for tenant in tenants:
        assert tenant.output == greedy_reference(model, tenant.tokens[: tenant.prompt_len], len(tenant.output))


WISHES = (
    GREEDY,
    SamplingParams(1000, temperature=1.0, seed=7),
    SamplingParams(1000, temperature=0.8, top_p=0.9, top_k=20, seed=8, logprobs=2),
    SamplingParams(1000, temperature=1.2, seed=9, frequency_penalty=0.8, repetition_penalty=1.3),
    SamplingParams(1000, min_new_tokens=12, seed=10, logit_bias=((3, 2.0), (9, -4.0))),
)


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_give_the_tokens_of_one_after_the_other_in_fewer_steps(page_size):
    model = hf_model("llama")
    plain, drafted = (build(model, page_size=page_size) for _ in range(2))
    stops = (2, 11, 30)
    tenants = [plain.tenant(i, prompt_of(5 + 9 * i, i), w, stop_token_ids=stops) for i, w in enumerate(WISHES)]
    answers = plain.generate(tenants, 30)
    again = [drafted.tenant(t.row, t.tokens[: t.prompt_len], t.sampling, stop_token_ids=stops) for t in tenants]
    assert drafted.generate_drafted(again, answers) < 25
    assert [tenant.output for tenant in again] == answers


def test_a_row_can_come_back_with_its_output():
    """After a retraction the same tokens are computed again as one prompt; only the later ones are new."""
    model = hf_model("llama")
    driver = build(model)
    tenant = driver.tenant(1, prompt_of(9, seed=8), GREEDY)
    driver.generate([tenant], 5)
    back = driver.tenant(2, tenant.tokens, GREEDY)
    driver.generate([back], 5)
    assert tenant.output + back.output == greedy_reference(model, prompt_of(9, seed=8), 10)


def test_steps_launched_ahead_take_effect_in_order():
    """Step n+1 is launched before step n ran, and its input token is what step n samples."""
    model = hf_model("llama")
    driver = build(model)
    runner = driver.runner
    tenant = driver.tenant(2, prompt_of(12, seed=9), GREEDY)
    batch, _ = driver.plan([tenant], 100)
    previous = runner.forward(batch)
    runner.sample(previous, None)
    output = []
    for _ in range(6):
        tenant.tokens.append(-1)  # known to exist, not yet by value
        batch, _ = driver.plan([tenant], 100)
        current = runner.forward(batch)
        output += runner.result(previous).tokens.tolist()
        runner.sample(current, None)
        previous = current
    output += runner.result(previous).tokens.tolist()
    assert output == greedy_reference(model, prompt_of(12, seed=9), 7)


def test_bfloat16_weights_and_cache_stay_close():
    model = hf_model("llama", tied=True).to(torch.bfloat16).float()
    config = our_config(model)
    ours = load_model(config, model.state_dict().items(), torch.bfloat16, CPU, context_length=128)
    runner = ModelRunner(
        ours,
        config,
        ExecutorShape(
            num_rows=2,
            context_length=128,
            pool_tokens=128,
            page_size=1,
            num_tokens_vocab=VOCAB,
            kv_dtype=torch.bfloat16,
            device=CPU,
        ),
    )
    spy: list[torch.Tensor] = []
    head = ours.logits
    ours.logits = lambda x: spy.append(head(x)) or spy[-1].clone()
    tokens = prompt_of(40, seed=10)
    all_logits(StepDriver(runner, pool_tokens=128, page_size=1), tokens)
    expected = reference_logits(model, tokens)
    assert (torch.cat(spy) - expected).norm() < 0.03 * expected.norm()


def test_refuses_by_name():
    model = hf_model("llama")
    weights = dict(model.state_dict())
    config = our_config(model)

    def load(changed):
        return load_model(config, changed.items(), torch.float32, CPU)

    without_head = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"lacks tensor lm_head\.weight"):
        load(without_head)
    with pytest.raises(ModelError, match=r"has tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load(weights | {"model.norm.weight": torch.zeros(47)})
    load(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    with pytest.raises(ModelError, match="appears twice"):
        load_model(config, [*weights.items(), *weights.items()], torch.float32, CPU)


def test_refuses_an_unknown_architecture_and_lists_the_known():
    config = dataclasses.replace(our_config(hf_model("llama")), architecture="MambaForCausalLM")
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load_model(config, [], torch.float32, CPU)


def test_the_registry_has_what_the_door_accepts() -> None:
    assert set(MODELS.names) == set(ARCHITECTURES)
