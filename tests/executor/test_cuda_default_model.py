"""The default model in bfloat16 on a GPU, judged token by token by transformers on the same GPU in float32.

Both have the weights that bfloat16 leaves. A token must be the best by transformers' logits after the same tokens, or
so near to it that what bfloat16 rounds between the layers may make it the best.
"""

from __future__ import annotations

import pytest
import torch
from server import reference_model
from step_driver import StepDriver, Tenant

from srt.executor.shape import ExecutorShape
from srt.executor.weights import iterate_weights
from srt.messages import SamplingParams
from srt.model_files import ModelFiles
from srt.models.loader import load_model
from srt.tokenization import Tokenizer

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=1000, temperature=0.0)
NEAR_TIE = 0.25
LEAST_BEST = 0.98
CONTEXT, POOL, ROWS, NEW_TOKENS = 1024, 32768, 64, 64
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils at",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n- a pinch of salt\n\nMethod:\n1.",
    "In the beginning the Universe was created. This has made a lot of people",
    "Q: What has keys but cannot open locks?\nA:",
)


@pytest.fixture(scope="module")
def reference(default_model: ModelFiles):
    return reference_model.load(default_model).to(torch.bfloat16).float().cuda()


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def driver(request, default_model: ModelFiles) -> StepDriver:
    from srt.executor.cuda_runner import CudaRunner

    config, device = default_model.model_config, torch.device("cuda", 0)
    weights = iterate_weights(default_model, torch.bfloat16)
    runner = CudaRunner(
        load_model(config, weights, torch.bfloat16, device, context_length=CONTEXT),
        config,
        ExecutorShape(
            num_rows=ROWS,
            context_length=CONTEXT,
            pool_tokens=POOL,
            page_size=1,
            num_tokens_vocab=config.vocab_size,
            kv_dtype=torch.bfloat16,
            device=device,
        ),
        most_tokens=2048,
        graphs=request.param,
    )
    runner.warm_up()
    return StepDriver(runner, pool_tokens=POOL, page_size=1)


@pytest.fixture(scope="module")
def prompts(default_model: ModelFiles) -> list[list[int]]:
    """As many as there are rows, of 5 to 300 tokens."""
    tokenizer = Tokenizer.from_folder(default_model.tokenizer_folder)
    texts = ["\n\n".join((TEXTS * 3)[first : first + 1 + row // 8 * 2]) for row in range(ROWS) for first in [row % 8]]
    return [tokenizer.encode(text, True) for text in texts]


def lost(reference, tenant: Tenant) -> torch.Tensor:
    """By how much each token's logit is below the best."""
    with torch.inference_mode():
        logits = reference(torch.tensor([tenant.tokens], device="cuda")).logits[0, tenant.prompt_len - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tenant.output, device="cuda")[:, None])[:, 0]
    return (logits.amax(-1) - chosen).cpu()


def test_alone_together_and_from_the_cache(reference, driver, prompts):
    alone = driver.tenant(0, prompts[13], GREEDY)
    driver.generate([alone], NEW_TOKENS)
    hit = driver.tenant(1, alone.tokens[: alone.prompt_len], GREEDY)
    driver.share(hit, alone, alone.prompt_len - 1)
    driver.generate([hit], NEW_TOKENS)
    together = [driver.tenant(row, prompt, GREEDY) for row, prompt in enumerate(prompts)]
    driver.generate(together, NEW_TOKENS, chunk=200)
    losses_of_each = [lost(reference, tenant) for tenant in (alone, hit, *together)]
    first = torch.stack([losses[losses > 0][:1].sum() for losses in losses_of_each])  # where texts begin to differ
    losses = torch.cat(losses_of_each)
    print(f"best: {(losses == 0).float().mean():.4f}, lost at most {losses.max():.3f} of {len(losses)} tokens,")
    print(f"where one of {len(first)} texts first differs from that of the best tokens at most {first.max():.3f}")
    assert losses.max() < NEAR_TIE
    assert (losses == 0).float().mean() > LEAST_BEST
