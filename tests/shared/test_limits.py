"""What the door refuses is exactly what an otherwise empty ledger cannot hold."""

import itertools

import pytest

from radix import Ledger
from srt.limits import Limits
from srt.messages import pack_ids


def can_be_served(limits, prompt_tokens, max_new_tokens):
    """Runs the request on a real ledger: prompt first, then a slot for each generated token but the last."""
    if prompt_tokens + max_new_tokens > limits.context_length:
        return False
    ledger = Ledger(
        num_pages=limits.pool_tokens // limits.page_size,
        page_size=limits.page_size,
        num_rows=1,
        context_length=limits.context_length,
    )
    tenancy = ledger.open(b"", pack_ids(range(prompt_tokens - 1)), prompt_tokens)
    if tenancy is None:
        return False
    for length in range(prompt_tokens + 1, prompt_tokens + max_new_tokens):
        if ledger.pages_to_grow(tenancy, length) * limits.page_size > ledger.available_tokens:
            return False
        ledger.grow(tenancy, length)
    return True


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("context_length", [2, 5, 8, 12])
def test_refused_is_what_the_ledger_cannot_hold(page_size, context_length):
    for pool_tokens in range(page_size, 14):
        limits = Limits(context_length, pool_tokens, page_size)
        for prompt, new in itertools.product(range(1, 15), range(1, 15)):
            served = can_be_served(limits, prompt, new)
            assert (limits.refusal(prompt, new) is None) == served, (limits, prompt, new)
            assert (new <= limits.max_new_tokens(prompt)) == served


def test_the_sentence_names_what_is_too_small():
    refusal = Limits(100, 1000, 1).refusal(90, 11)
    assert "maximum context length is 100 tokens" in refusal
    assert "101 tokens (90 in the prompt, 11 for the completion)" in refusal
    refusal = Limits(1000, 50, 16).refusal(40, 20)
    assert "KV cache holds 50 tokens" in refusal
    assert "60 tokens (40 in the prompt, 20 for the completion)" in refusal
