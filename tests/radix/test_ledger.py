"""The ledger's promises one by one, each in the smallest case that shows it."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_harness import cached_pages, to_key

from radix import Ledger, LedgerError, Tenancy, check_ledger
from radix.allocator import TokenToKVPoolAllocator
from radix.tree import common_length


def make(num_pages: int = 16, page_size: int = 1, num_rows: int = 4, context_length: int = 32, **options) -> Ledger:
    return Ledger(num_pages=num_pages, page_size=page_size, num_rows=num_rows, context_length=context_length, **options)


def key(*tokens: int) -> bytes:
    return to_key(tokens)


def run(ledger: Ledger, tokens: bytes, namespace: bytes = b"") -> None:
    """One request from start to end, all of it cached."""
    tenancy = ledger.open(namespace, tokens, len(tokens) // 4)
    ledger.close(tenancy, tokens)
    check_ledger(ledger)


def row(ledger: Ledger, tenancy: Tenancy, length: int) -> list[int]:
    return ledger.table[tenancy.row, :length].tolist()


def test_fresh_ledger() -> None:
    ledger = make(num_pages=5, page_size=4, num_rows=3, context_length=9)
    assert (ledger.capacity, ledger.free_tokens, ledger.available_tokens) == (20, 20, 20)
    assert (ledger.cached_tokens, ledger.evictable_tokens, ledger.locked_tokens, ledger.held_tokens) == (0, 0, 0, 0)
    assert (ledger.free_rows, ledger.evicted_total, ledger.table.shape, ledger.table.dtype) == (3, 0, (3, 12), np.int32)
    check_ledger(ledger)


def test_page_zero_is_never_handed_out() -> None:
    ledger = make(num_pages=4, page_size=4, context_length=16)
    tenancy = ledger.open(b"", b"", 16)
    assert sorted(row(ledger, tenancy, 16)) == list(range(4, 20))


@pytest.mark.parametrize("page_size", [1, 4])
def test_allocator_hands_out_whole_pages_in_a_fixed_order(page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(6, page_size)
    first, second = allocator.alloc(2), allocator.alloc(3)
    assert first.tolist() == list(range(page_size, 3 * page_size))
    assert second.tolist() == list(range(3 * page_size, 6 * page_size))
    allocator.free(first)
    assert first.tolist() == allocator.alloc(2).tolist()
    with pytest.raises(AssertionError):
        allocator.alloc(2)


@pytest.mark.parametrize("unit", [4, 16])
def test_common_length_is_that_of_a_byte_by_byte_comparison(unit: int) -> None:
    a = bytes(range(160))
    for differs in [*range(0, 160, 7), 159]:
        b = b"head" + a[:differs] + bytes([a[differs] ^ 1]) + a[differs + 1 :]
        assert common_length(a, b, 4, unit) == differs // unit * unit
    assert common_length(a, a[:35], 0, unit) == 35 // unit * unit
    assert common_length(a, b"", 0, unit) == 0


def test_match_ends_at_a_page() -> None:
    ledger = make(page_size=4)
    run(ledger, key(*range(10)))
    assert ledger.cached_tokens == 8
    assert ledger.peek(b"", key(*range(10))) == 8
    assert ledger.peek(b"", key(*range(7))) == 4
    assert ledger.peek(b"", key(0, 1, 2, 3, 4, 5, 9, 7)) == 4
    assert ledger.peek(b"", key(0, 1, 2)) == 0


def test_split_within_a_node_keeps_every_slot() -> None:
    ledger = make()
    run(ledger, key(1, 2, 3, 4, 5, 6))
    before = cached_pages(ledger)
    tenancy = ledger.open(b"", key(1, 2, 3, 9), 5)
    assert tenancy.cached_tokens == 3
    assert cached_pages(ledger) == before
    assert row(ledger, tenancy, 3) == [before[b"", key(*range(1, n))][0] for n in (2, 3, 4)]
    assert (ledger.locked_tokens, ledger.evictable_tokens, ledger.held_tokens) == (3, 3, 2)
    check_ledger(ledger)
    ledger.close(tenancy, key(1, 2, 3, 9))
    assert [ledger.peek(b"", key(1, 2, 3, last)) for last in (4, 9, 7)] == [4, 4, 3]
    check_ledger(ledger)


def test_split_below_a_running_request() -> None:
    ledger = make()
    run(ledger, key(1, 2, 3, 4))
    whole = ledger.open(b"", key(1, 2, 3, 4), 5)
    part = ledger.open(b"", key(1, 2, 7), 4)
    assert (whole.shared, part.shared, ledger.locked_tokens) == (4, 2, 4)
    check_ledger(ledger)
    ledger.close(whole, None)
    assert (ledger.locked_tokens, ledger.evictable_tokens) == (2, 2)
    ledger.close(part, None)
    check_ledger(ledger)


def test_peek_does_not_count_as_use() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 1, 1))
    run(ledger, key(2, 2, 2))
    ledger.peek(b"", key(1, 1, 1))
    ledger.open(b"", b"", 5)
    assert [ledger.peek(b"", key(n, n, n)) for n in (1, 2)] == [0, 3]


def test_open_counts_as_use() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 1, 1))
    run(ledger, key(2, 2, 2))
    ledger.close(ledger.open(b"", key(1, 1, 1), 3), None)
    ledger.open(b"", b"", 5)
    assert [ledger.peek(b"", key(n, n, n)) for n in (1, 2)] == [3, 0]


def test_a_refused_open_changes_nothing() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 1, 1))
    run(ledger, key(2, 2, 2))
    before = cached_pages(ledger)
    assert ledger.open(b"", key(1, 1), 9) is None
    assert ledger.open(b"", key(1, 1), 8, reserve=1) is None
    assert cached_pages(ledger) == before
    check_ledger(ledger)
    ledger.open(b"", b"", 5)
    assert [ledger.peek(b"", key(n, n, n)) for n in (1, 2)] == [0, 3]


def test_open_fits_exactly() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 2, 3, 4, 5, 6))
    assert ledger.open(b"", key(1, 2, 9), 8, reserve=1) is None
    tenancy = ledger.open(b"", key(1, 2, 9), 8)
    assert (tenancy.cached_tokens, tenancy.allocated, ledger.available_tokens) == (2, 8, 0)
    assert ledger.evicted_total == 4
    check_ledger(ledger)


def test_no_row_no_tenancy() -> None:
    ledger = make(num_rows=1)
    assert ledger.open(b"", b"", 1).row == 0
    assert ledger.open(b"", b"", 1) is None


def test_length_shorter_than_the_match() -> None:
    ledger = make(page_size=4)
    run(ledger, key(*range(12)))
    tenancy = ledger.open(b"", key(*range(12)), 5)
    assert (tenancy.shared, tenancy.allocated, ledger.held_tokens) == (12, 12, 0)


def test_locked_pages_survive_eviction() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 1, 1))
    run(ledger, key(2, 2, 2))
    locked = ledger.open(b"", key(1, 1, 1), 3)
    slots = row(ledger, locked, 3)
    other = ledger.open(b"", b"", 5)
    assert (ledger.peek(b"", key(1, 1, 1)), ledger.peek(b"", key(2, 2, 2))) == (3, 0)
    assert not any(slot in slots for slot in row(ledger, other, 5))
    assert ledger.pages_to_grow(locked, 4) == 1
    with pytest.raises(AssertionError):
        ledger.grow(locked, 4)


def test_the_tail_of_the_oldest_leaf_goes_first() -> None:
    ledger = make(num_pages=8)
    run(ledger, key(1, 2, 3, 4))
    run(ledger, key(1, 2, 7, 8))
    ledger.open(b"", b"", 3)
    assert [ledger.peek(b"", key(1, 2, a, b)) for a, b in ((3, 4), (7, 8))] == [3, 4]
    ledger.open(b"", b"", 4)
    assert [ledger.peek(b"", key(1, 2, a, b)) for a, b in ((3, 4), (7, 8))] == [1, 1]
    check_ledger(ledger)


def test_a_long_leaf_is_evicted_in_sixteenths() -> None:
    ledger = make(num_pages=160, page_size=2, context_length=320)
    run(ledger, key(*range(320)))
    ledger.open(b"", b"", 1)
    assert (ledger.evicted_total, ledger.free_tokens, ledger.cached_tokens) == (20, 18, 300)
    check_ledger(ledger)


def test_a_prefix_longer_than_host_memory_leaves_its_head_there() -> None:
    ledger = make(40, num_rows=1, context_length=40, host_pages=10)
    first = key(*range(40))
    run(ledger, first)
    run(ledger, key(*range(100, 140)))
    assert ledger.peek(b"", first) == 10


def test_full_pool_is_reused_from_end_to_end() -> None:
    ledger = make(num_pages=6, page_size=4, context_length=24)
    for first in range(5):
        run(ledger, key(*range(first * 100, first * 100 + 24)))
        assert (ledger.cached_tokens, ledger.free_tokens, ledger.evicted_total) == (24, 0, first * 24)


def test_share_gives_pages_to_the_tree_as_they_are_computed() -> None:
    ledger = make(page_size=4)
    tokens = key(*range(10))
    first = ledger.open(b"", tokens, 10)
    assert ledger.share(first, tokens[: 6 * 4]) == 6
    assert (first.shared, ledger.cached_tokens, ledger.held_tokens, ledger.locked_tokens) == (4, 4, 8, 4)
    second = ledger.open(b"", tokens, 10)
    assert second.cached_tokens == 4
    assert row(ledger, second, 4) == row(ledger, first, 4)
    assert ledger.share(first, tokens) == 10
    assert ledger.share(first, tokens) == 10
    check_ledger(ledger)


def test_duplicates_are_freed_and_rewritten() -> None:
    ledger = make()
    tokens = key(1, 2, 3, 4, 5)
    first, second = ledger.open(b"", tokens, 5), ledger.open(b"", tokens, 5)
    ledger.share(first, tokens)
    own = row(ledger, second, 5)
    assert ledger.free_tokens == 6
    assert ledger.share(second, tokens[:12]) == 0
    assert row(ledger, second, 5) == row(ledger, first, 3) + own[3:]
    assert (second.shared, ledger.free_tokens, ledger.held_tokens) == (3, 9, 2)
    check_ledger(ledger)
    assert ledger.share(second, key(1, 2, 3, 4, 9)) == 3
    assert row(ledger, second, 5) == row(ledger, first, 4) + own[4:]
    assert (ledger.cached_tokens, ledger.held_tokens) == (6, 0)
    check_ledger(ledger)


@pytest.mark.parametrize(("computed", "cached"), [(None, 0), (key(), 0), (key(1, 2, 3, 4, 5), 4)])
def test_close_frees_what_it_does_not_cache(computed: bytes | None, cached: int) -> None:
    ledger = make(page_size=4)
    tenancy = ledger.open(b"", key(1, 2, 3, 4, 5), 9)
    ledger.close(tenancy, computed)
    assert (ledger.cached_tokens, ledger.evictable_tokens, ledger.free_tokens) == (cached, cached, 64 - cached)
    assert ledger.free_rows == 4
    check_ledger(ledger)
    with pytest.raises(AssertionError):
        ledger.close(tenancy, None)


def test_namespaces_are_apart() -> None:
    ledger = make()
    run(ledger, key(1, 2, 3), b"a")
    assert [ledger.peek(name, key(1, 2, 3)) for name in (b"", b"a", b"b")] == [0, 3, 0]
    run(ledger, key(1, 2, 3), b"b")
    assert ledger.cached_tokens == 6
    tenancy = ledger.open(b"c", key(1, 2, 3), 3)
    assert tenancy.cached_tokens == 0
    ledger.close(tenancy, None)
    assert list(ledger.cache.roots) == [b"a", b"b"]
    ledger.open(b"", b"", 14)
    assert list(ledger.cache.roots) == [b"b", b""]
    check_ledger(ledger)


def test_flush_forgets_everything() -> None:
    ledger = make(num_pages=10, page_size=4)
    run(ledger, key(*range(12)))
    run(ledger, key(*range(8), 20, 21, 22, 23), b"n")
    tenancy = ledger.open(b"", key(0, 1, 2, 3), 4)
    with pytest.raises(AssertionError):
        ledger.flush()
    ledger.close(tenancy, None)
    ledger.flush()
    assert (ledger.free_tokens, ledger.cached_tokens, ledger.evicted_total, ledger.cache.roots) == (40, 0, 0, {})
    check_ledger(ledger)


def test_without_cache_nothing_is_kept() -> None:
    ledger = make(cache_enabled=False)
    tokens = key(1, 2, 3)
    tenancy = ledger.open(b"", tokens, 3)
    assert ledger.share(tenancy, tokens) == 3
    check_ledger(ledger)
    ledger.close(tenancy, tokens)
    assert (ledger.peek(b"", tokens), ledger.cached_tokens, ledger.free_tokens) == (0, 0, 16)
    assert ledger.open(b"", tokens, 3).cached_tokens == 0
    check_ledger(ledger)


@pytest.mark.parametrize("page_size", [1, 4])
def test_growing_together_is_growing_one_by_one(page_size: int) -> None:
    one, all_ = (make(num_pages=32, page_size=page_size, context_length=16) for _ in range(2))
    opened = []
    for ledger in (one, all_):
        run(ledger, key(*range(12)))
        opened.append([ledger.open(b"", b"", length) for length in (1, 4, 7)])
    lengths = [3, 4, 8]
    for tenancy, length in zip(opened[0], lengths, strict=True):
        one.grow(tenancy, length)
    all_.grow_all(opened[1], lengths)
    assert [t.allocated for t in opened[0]] == [t.allocated for t in opened[1]]
    assert np.array_equal(one.table, all_.table)
    check_ledger(all_)
    with pytest.raises(AssertionError):
        all_.grow_all(opened[1], [3, 17, 8])


def test_deep_chains() -> None:
    """A path of 5,000 nodes: no operation may recurse."""
    depth = 5000
    ledger = make(num_pages=depth + 10, context_length=depth + 10)
    tokens = key(*range(depth))
    tenancy = ledger.open(b"", tokens, depth)
    ledger.close(tenancy, tokens)
    for end in range(depth - 1, 0, -1):
        ledger.close(ledger.open(b"", tokens[: end * 4], end), None)
    assert len(list(ledger.cache.order)) == depth
    check_ledger(ledger)
    assert ledger.peek(b"", tokens) == depth
    tenancy = ledger.open(b"", tokens + key(1), depth + 1)
    assert tenancy.cached_tokens == depth
    check_ledger(ledger)
    ledger.close(tenancy, None)
    ledger.open(b"", b"", depth // 2)
    assert ledger.peek(b"", tokens) == depth + 10 - depth // 2
    check_ledger(ledger)


def test_a_prompt_in_pieces_is_one_node_as_long_as_nobody_else_uses_it() -> None:
    ledger = make(num_pages=64, context_length=32)
    first = ledger.open(b"", key(*range(20)), 20)
    for end in (3, 4, 9):
        ledger.share(first, key(*range(end)))
    assert first.node.key == key(*range(9))
    assert first.node.slots.tolist() == ledger.table[first.row, :9].tolist()
    second = ledger.open(b"", key(*range(9)), 10)
    assert second.node is first.node
    ledger.share(first, key(*range(12)))
    assert first.node.parent is second.node
    assert first.node.key == key(9, 10, 11)
    check_ledger(ledger)
    assert ledger.peek(b"", key(*range(20))) == 12


def corrupt_count(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.cache.cached_tokens += 1


def corrupt_evictable(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.cache.evictable_tokens -= 1


def corrupt_lock(ledger: Ledger, tenancy: Tenancy) -> None:
    tenancy.node.lock_ref += 1


def corrupt_order(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.cache.order.discard(ledger.cache.order.first())


def corrupt_serials(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.cache.order.first().serial += 100


def corrupt_row(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.table[tenancy.row, 0] += 1


def corrupt_own_slot(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.table[tenancy.row, 6] = 0


def leak_page(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.allocator.alloc(1)


def free_twice(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.allocator.free(ledger.table[tenancy.row, 4:6])


def forget_row(ledger: Ledger, tenancy: Tenancy) -> None:
    ledger.pool.free_rows.pop()


def lose_node(ledger: Ledger, tenancy: Tenancy) -> None:
    tenancy.node.parent.children.clear()


def rename_child(ledger: Ledger, tenancy: Tenancy) -> None:
    children = tenancy.node.parent.children
    children[key(8, 8)] = children.pop(key(1, 2))


def wrong_namespace(ledger: Ledger, tenancy: Tenancy) -> None:
    tenancy.namespace = b"other"


def half_page(ledger: Ledger, tenancy: Tenancy) -> None:
    tenancy.allocated -= 1


def empty_root(ledger: Ledger, tenancy: Tenancy) -> None:
    root = ledger.cache.roots[b""]
    ledger.cache.roots[b"x"] = type(root)(b"x", root.slots, None)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_count, "cached_tokens is 7, the tree has 6"),
        (corrupt_evictable, "evictable_tokens is 1, the tree has 2"),
        (corrupt_lock, "is locked by 1 tenancies"),
        (corrupt_order, "eviction order"),
        (corrupt_serials, "eviction order"),
        (corrupt_row, "not the slots of its locked path"),
        (corrupt_own_slot, "not a page of the pool and are held by row 0"),
        (leak_page, "must be in one place; it is nowhere"),
        (free_twice, "it is free and held by row 0"),
        (forget_row, "the rows that are free or open"),
        (lose_node, "cached_tokens is 6, the tree has 0"),
        (rename_child, "wrong first page"),
        (wrong_namespace, "outside its namespace"),
        (half_page, "shares 4 tokens of 7"),
        (empty_root, "is empty"),
    ],
)
def test_check_ledger_finds_what_is_wrong(corrupt, message: str) -> None:
    ledger = make(page_size=2, context_length=10)
    run(ledger, key(1, 2, 3, 4, 5, 6))
    ledger.close(ledger.open(b"", key(1, 2, 3, 4), 4), None)
    tenancy = ledger.open(b"", key(1, 2, 3, 4), 8)
    check_ledger(ledger)
    corrupt(ledger, tenancy)
    with pytest.raises(LedgerError, match=message):
        check_ledger(ledger)
