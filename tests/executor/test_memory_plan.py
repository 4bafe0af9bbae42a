"""How large the KV pool becomes."""

from __future__ import annotations

import os

import pytest

from srt.executor.memory_plan import available_ram, own_ram, plan_memory
from srt.model_config import ModelError

GIB = 2**30


def plan(**changed):
    values = {
        "free_before": 100 * GIB,
        "free_after": 90 * GIB,
        "fraction": 0.8,
        "bytes_per_token": 2**20,
        "page_size": 16,
        "max_total_tokens": None,
    }
    return plan_memory(**values | changed)


def test_pool_is_what_the_fraction_leaves_beside_the_weights():
    made = plan()
    # 0.8 of 100 GiB, less 10 GiB of weights: 70 GiB, one page of which is the spare one.
    assert made.pool_bytes == 70 * GIB
    assert made.pool_tokens == 70 * 1024 - 16
    assert made.weights == 10 * GIB


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_whole_pages_within_the_budget(page_size):
    made = plan(page_size=page_size, bytes_per_token=999_983)
    budget = 70 * GIB
    assert made.pool_tokens % page_size == 0
    assert made.pool_bytes <= budget < made.pool_bytes + page_size * 999_983


def test_max_total_tokens_caps_in_whole_pages():
    assert plan(max_total_tokens=1000).pool_tokens == 992
    assert plan(max_total_tokens=10**9).pool_tokens == plan().pool_tokens
    assert plan(max_total_tokens=5).pool_tokens == 16


def test_refusal_says_how_much_and_which_way():
    with pytest.raises(ModelError, match=r"take 10,272\.0 MiB, but --mem-fraction-static 0\.1 .*raise it to 0\.101 at"):
        plan(fraction=0.1)
    assert plan(fraction=0.101).pool_tokens
    with pytest.raises(ModelError, match=r"is 90,112\.0 MiB: serve a smaller model"):
        plan(fraction=0.88, free_after=0)


def test_the_report_tells_tokens_bytes_and_the_sum():
    text = str(plan(max_total_tokens=1000))
    assert "992 tokens" in text
    assert "71664" in text  # what would fit
    assert "90.00 GiB - free before 100.00 GiB x (1 - 0.8)" in text


def test_available_ram_is_below_what_the_machine_has():
    assert 0 < available_ram() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_own_ram_grows_by_what_is_written_to():
    before = own_ram()
    block = bytearray(b"\1") * (64 << 20)
    assert 60 << 20 < own_ram() - before < 80 << 20
    del block
