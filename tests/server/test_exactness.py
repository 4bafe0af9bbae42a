"""Greedy output is that of transformers, token by token, however a request is batched, cut up, cached or set back.

Both compute in float32, yet not in the same order, so logits differ in their last bits. Two tokens whose logits are
closer than that may rightly change places, and from there on texts differ. So outputs are compared up to the first
position where transformers' two best logits lie nearer than twice the difference measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import reference_model
from reference_model import Continuation
from server_harness import Server, at_once, running

from srt.model_files import ModelFiles
from srt.tokenization import Tokenizer

MOST_DIFFERENCE = 0.01  # of log-probabilities; beyond it is another model, not another order of sums
MOST_TIES = 2  # of the prompts

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer briefly, you "
    "say so when you do not know, and you never make up a source.<|im_end|>\n<|im_start|>user\n"
)
QUESTIONS = (
    "What is the capital of Portugal?",
    "Explain photosynthesis to a child.",
    "Write a haiku about the sea.",
    "How many days has a leap year, and why?",
    "Translate 'good morning' into German, French and Italian.",
    "List three uses of copper.",
)
TEXTS = (
    "The",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "import numpy as np\n\n\ndef softmax(x: np.ndarray) -> np.ndarray:\n",
    "Dear Sir or Madam,\n\nI am writing to you because",
    '{"name": "Alice", "age": 31, "city": "Paris"}\n{"name": "Bob", "age":',
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils at",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n- a pinch of salt\n\nMethod:\n1.",
    "In the beginning the Universe was created. This has made a lot of people",
    "Größe und Gewicht sind 12,5 cm und 3 kg. Die Farbe ist",
    "| country | capital |\n|---|---|\n| Italy | Rome |\n| Spain |",
    "Q: What has keys but cannot open locks?\nA:",
)


@dataclass(frozen=True)
class Reference:
    prompts: list[list[int]]
    answers: list[Continuation]
    num_chats: int  # prompts that come first
    num_shared: int  # tokens that these have in common
    steps: int  # tokens of each answer


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 3, 16), id="some"),
        pytest.param((len(QUESTIONS), 1, 64), id="all", marks=pytest.mark.slow),
    ],
)
def reference(request: pytest.FixtureRequest, default_model: ModelFiles) -> Reference:
    num_chats, stride, steps = request.param
    tokenizer = Tokenizer.from_folder(default_model.tokenizer_folder)
    chats = [f"{SYSTEM}{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS[:num_chats]]
    prompts = [list(tokenizer.encode(text, False)) for text in (*chats, *TEXTS[::stride])]
    columns = zip(*prompts[:num_chats], strict=False)
    num_shared = len(list(itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)))
    model = reference_model.load(default_model)
    return Reference(prompts, reference_model.greedy(model, prompts, steps), num_chats, num_shared, steps)


@pytest.fixture(scope="module")
def all_at_once(server: Server, reference: Reference) -> list[Any]:
    """/generate's answers, with log-probabilities."""

    def ask(prompt: list[int]) -> Any:
        params = {"max_new_tokens": reference.steps, "temperature": 0, "ignore_eos": True}
        return server.ask("/generate", input_ids=prompt, sampling_params=params, return_logprob=True)

    server.post("/flush_cache?timeout=60")
    return at_once([lambda prompt=prompt: ask(prompt) for prompt in reference.prompts])


@pytest.fixture(scope="module")
def tolerance(all_at_once: list[Any], reference: Reference) -> float:
    """Twice what the log-probabilities of the chosen tokens differ by at most, where both chose alike."""
    difference = 0.0
    for body, answer in zip(all_at_once, reference.answers, strict=True):
        for (logprob, token, *_), expected, own in zip(
            body["meta_info"]["output_token_logprobs"], answer.ids, answer.logprobs, strict=True
        ):
            if token != expected:
                break
            difference = max(difference, abs(logprob - own))
    print(f"log-probabilities differ from transformers' by at most {difference:.2g}")
    assert 0 < difference < MOST_DIFFERENCE
    return 2 * difference


@pytest.fixture
def check(reference: Reference, tolerance: float) -> Callable[[list[Any]], None]:
    """Compares /generate's answers to all prompts with the reference."""

    def check_all(bodies: list[Any]) -> None:
        ends, steps = [], reference.steps
        for body, answer in zip(bodies, reference.answers, strict=True):
            end = next((i for i, gap in enumerate(answer.gaps) if gap < tolerance), steps)
            assert len(body["output_ids"]) == steps
            assert body["output_ids"][:end] == answer.ids[:end]
            ends.append(end)
        whole = ends.count(steps)
        print(
            f"{whole} of {len(ends)} prompts are equal to the end, {sum(ends)} of {steps * len(ends)} tokens compared"
        )
        assert whole >= len(ends) - MOST_TIES, ends

    return check_all


def ask_all(server: Server, prompts: list[list[int]], steps: int) -> list[Any]:
    return at_once([lambda prompt=prompt: server.generate(prompt, steps) for prompt in prompts])


def cached_tokens(bodies: list[Any]) -> list[int]:
    return [body["meta_info"]["cached_tokens"] for body in bodies]


def test_one_at_a_time(server: Server, reference: Reference, check: Any) -> None:
    server.post("/flush_cache?timeout=60")
    check([server.generate(prompt, reference.steps) for prompt in reference.prompts])


def test_all_at_once_in_chunks(all_at_once: list[Any], check: Any) -> None:
    check(all_at_once)


def test_second_time_from_the_cache(server: Server, reference: Reference, check: Any) -> None:
    ask_all(server, reference.prompts, 1)
    bodies = ask_all(server, reference.prompts, reference.steps)
    assert cached_tokens(bodies) == [len(prompt) - 1 for prompt in reference.prompts]
    check(bodies)


def test_shared_prefix(server: Server, reference: Reference, check: Any) -> None:
    server.post("/flush_cache?timeout=60")
    server.generate(reference.prompts[0], 1)
    bodies = ask_all(server, reference.prompts, reference.steps)
    assert min(cached_tokens(bodies)[: reference.num_chats]) >= reference.num_shared > 40
    check(bodies)


@pytest.mark.slow
def test_pages_of_sixteen_and_chunks_of_seven(reference: Reference, check: Any) -> None:
    flags = ("--page-size", "16", "--chunked-prefill-size", "7")
    with running("--dtype", "float32", *flags) as server:
        check(ask_all(server, reference.prompts, reference.steps))
        bodies = ask_all(server, reference.prompts, reference.steps)
    assert cached_tokens(bodies) == [(len(prompt) - 1) // 16 * 16 for prompt in reference.prompts]
    check(bodies)


@pytest.mark.slow
def test_retraction(reference: Reference, check: Any) -> None:
    """All come in one request, so that admission lets them in at its first reserve, and outgrow the pool together."""
    count, shared = len(reference.prompts), (reference.num_chats - 1) * reference.num_shared
    pool = sum(map(len, reference.prompts)) - shared + int(0.75 * count * reference.steps)
    params = {"max_new_tokens": reference.steps, "temperature": 0, "ignore_eos": True}
    with running("--dtype", "float32", "--max-total-tokens", str(pool)) as server:
        bodies = server.ask("/generate", input_ids=reference.prompts, sampling_params=params)
        server.wait_idle()
    assert sum(body["meta_info"]["num_retractions"] for body in bodies) > 0
    check(bodies)
