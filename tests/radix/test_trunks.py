"""Which rows are read together, against all ways to group them by what their lines of the slot table have in common."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_harness import to_key

from radix import Ledger, Tenancy


def opened(*prompts: tuple[int, ...], page_size: int = 1, cache_enabled: bool = True) -> tuple[Ledger, list[Tenancy]]:
    """Each is computed before the next comes."""
    ledger = Ledger(
        num_pages=400, page_size=page_size, num_rows=len(prompts), context_length=80, cache_enabled=cache_enabled
    )
    tenancies = []
    for prompt in prompts:
        tenancy = ledger.open(b"", to_key(prompt[:-1]), len(prompt))
        ledger.share(tenancy, to_key(prompt[:-1]))
        tenancies.append(tenancy)
    return ledger, tenancies


def found(ledger: Ledger, tenancies: list[Tenancy], least: int = 1) -> list[tuple[int, list[int]]]:
    return [tuple(trunk) for trunk in ledger.trunks(tenancies, least)]


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).cumprod().sum())


def saved(groups) -> int:
    return sum((len(members) - 1) * tokens for tokens, members in groups)


def best_saving(lines: list[np.ndarray]) -> int:
    """Of all choices of prefixes, each row reading the longest chosen one that it has."""
    prefixes = list({tuple(a[: in_common(a, b)].tolist()) for a, b in combinations(lines, 2)} - {()})
    best = 0
    for chosen in (subset for size in range(len(prefixes) + 1) for subset in combinations(prefixes, size)):
        groups = {prefix: [] for prefix in chosen}
        for index, line in enumerate(lines):
            own = [prefix for prefix in chosen if tuple(line[: len(prefix)].tolist()) == prefix]
            if own:
                groups[max(own, key=len)].append(index)
        best = max(best, saved((len(prefix), members) for prefix, members in groups.items() if members))
    return best


HEADS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=4)
"""Pieces of a prompt, each a token and how often it comes."""


@settings(max_examples=120, deadline=None, derandomize=True)
@given(prompts=st.lists(HEADS, min_size=1, max_size=6), page_size=st.sampled_from([1, 4]), least=st.integers(1, 20))
def test_members_have_the_same_slots_and_little_more_could_be_saved(prompts, page_size, least):
    texts = [tuple(token for token, times in pieces for _ in range(times)) + (9, 9) for pieces in prompts]
    ledger, tenancies = opened(*texts, page_size=page_size)
    lines = [ledger.table[tenancy.row, : tenancy.shared] for tenancy in tenancies]
    groups = found(ledger, tenancies, least)
    for tokens, members in groups:
        assert members == sorted(members)
        assert (len(members) - 1) * tokens >= least
        assert tokens % page_size == 0
        assert tokens == min(in_common(lines[members[0]], lines[index]) for index in members[1:])
    grouped = [index for _, members in groups for index in members]
    assert len(grouped) == len(dict.fromkeys(grouped))
    assert 2 * saved(found(ledger, tenancies)) >= best_saving(lines)


def test_a_short_common_head_gives_way_to_long_ones_below_it():
    head, left, right = (1,) * 4, (2,) * 30, (3,) * 30
    ledger, tenancies = opened(
        head + left + (5,), head + right + (5,), head + left + (6,), head + right + (7,), head + (8, 8)
    )
    assert found(ledger, tenancies) == [(34, [0, 2]), (34, [1, 3])]


def test_a_long_common_head_keeps_those_together_who_share_little_more():
    head = (1,) * 30
    ledger, tenancies = opened(*(head + (index // 2,) * 4 + (7, index) for index in range(6)))
    assert found(ledger, tenancies) == [(30, [0, 1, 2, 3, 4, 5])]


def test_only_those_asked_for_count():
    head = (1,) * 30
    ledger, tenancies = opened(*(head + (index, 9) for index in range(2, 6)))
    assert found(ledger, tenancies[:1]) == []
    assert found(ledger, [tenancies[3], tenancies[1]]) == [(30, [0, 1])]
    assert found(ledger, tenancies, least=91) == []
    assert found(ledger, []) == []


def test_a_prompt_that_others_continue_is_read_with_them():
    ledger, tenancies = opened((1,) * 21, (1,) * 20 + (2, 2, 2), (1,) * 20 + (2, 2, 3))
    assert found(ledger, tenancies) == [(20, [0, 1, 2])]


def test_nothing_is_shared_without_a_cache():
    ledger, tenancies = opened((1,) * 21, (1,) * 21, cache_enabled=False)
    assert found(ledger, tenancies) == []
