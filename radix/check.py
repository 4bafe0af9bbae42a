"""L3, each rank: proof that the ledger's books balance. Owns nothing; it visits everything, when idle and in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix.tree import NO_SLOTS, TOKEN_BYTES, Node

if TYPE_CHECKING:
    from radix.allocator import TokenToKVPoolAllocator
    from radix.eviction import EvictionOrder
    from radix.host_tier import HostTier
    from radix.ledger import Ledger, Tenancy


class LedgerError(Exception):
    """The ledger contradicts itself; the message says where."""


def check_ledger(ledger: Ledger) -> None:
    """Raises LedgerError unless every page is free, cached or held exactly once, and all counts are what they count."""
    nodes = _nodes(ledger)
    _check_nodes(ledger, nodes)
    _check_rows(ledger)
    _check_locks(ledger, nodes)
    in_pool = [node for node in nodes if not node.on_host]
    _check_order(ledger.cache.order, in_pool)
    _check_pages(ledger, in_pool)
    if ledger.host is not None:
        on_host = [node for node in nodes if node.on_host]
        _check_order(ledger.host.order, on_host)
        _check_host_pages(ledger.host, on_host)


def _name(node: Node) -> str:
    what = f"tokens {np.frombuffer(node.key, np.int32)[:8]}.." if node.parent else f"the root of {node.key!r}"
    return f"node {what} (serial {node.serial}, lock_ref {node.lock_ref})"


def _place(owner: Node | Tenancy | str) -> str:
    if isinstance(owner, str):
        return owner
    return f"cached in {_name(owner)}" if isinstance(owner, Node) else f"held by row {owner.row}"


def _nodes(ledger: Ledger) -> list[Node]:
    """All nodes but the roots, parents before children."""
    nodes = [child for root in ledger.cache.roots.values() for child in root.children.values()]
    for node in nodes:  # grows while it runs
        nodes.extend(node.children.values())
    return nodes


def _check_nodes(ledger: Ledger, nodes: list[Node]) -> None:
    page_bytes = ledger.page_size * TOKEN_BYTES
    roots = ledger.cache.roots
    for namespace, root in roots.items():
        if root.key != namespace:
            raise LedgerError(f"{_name(root)} stands for namespace {namespace!r}")
        if not root.children and not root.lock_ref:
            raise LedgerError(f"{_name(root)} is empty")
    for node in [*roots.values(), *nodes]:
        for first_page, child in node.children.items():
            if child.parent is not node:
                raise LedgerError(f"{_name(child)} has another parent than the node it hangs on")
            if child.key[:page_bytes] != first_page:
                raise LedgerError(f"{_name(child)} hangs on a wrong first page")
    for node in nodes:
        if not node.key or len(node.key) % page_bytes:
            raise LedgerError(f"{_name(node)} has {len(node.key)} bytes of key, not whole pages")
        if len(node.slots) * TOKEN_BYTES != len(node.key):
            raise LedgerError(f"{_name(node)} has {len(node.slots)} slots for {len(node.key) // TOKEN_BYTES} tokens")
        if node.parent.on_host and not node.on_host:
            raise LedgerError(f"{_name(node)} is in the pool, its parent in host memory")
    cached = sum(len(node.slots) for node in nodes if not node.on_host)
    if ledger.cached_tokens != cached:
        raise LedgerError(f"cached_tokens is {ledger.cached_tokens}, the tree has {cached}")


def _check_rows(ledger: Ledger) -> None:
    tenancies = [tenancy for tenancy in ledger.tenancies if tenancy is not None]
    rows = sorted(ledger.pool.free_rows + [tenancy.row for tenancy in tenancies])
    if rows != list(range(len(ledger.tenancies))):
        raise LedgerError(f"the rows that are free or open are {rows}")
    for tenancy in tenancies:
        row, shared = tenancy.row, tenancy.shared
        if ledger.tenancies[row] is not tenancy:
            raise LedgerError(f"row {row} has another tenancy than the one that claims it")
        in_pages = shared % ledger.page_size == 0 and tenancy.allocated % ledger.page_size == 0
        if not (in_pages and 0 <= shared <= tenancy.allocated <= ledger.table.shape[1]):
            raise LedgerError(f"row {row} shares {shared} tokens of {tenancy.allocated}")
        path, node = [], tenancy.node
        while node.parent is not None:
            path.append(node.slots)
            node = node.parent
        if ledger.cache.roots.get(tenancy.namespace) is not node:
            raise LedgerError(f"row {row} locks a node outside its namespace")
        if not np.array_equal(ledger.table[row, :shared], np.concatenate([NO_SLOTS, *path[::-1]])):
            raise LedgerError(f"row {row} shares {shared} tokens, but not the slots of its locked path")


def _check_locks(ledger: Ledger, nodes: list[Node]) -> None:
    expected = dict.fromkeys([*ledger.cache.roots.values(), *nodes], 0)
    for tenancy in ledger.tenancies:
        if tenancy is not None:
            if tenancy.node not in expected:
                raise LedgerError(f"row {tenancy.row} locks {_name(tenancy.node)}, which is not in the tree")
            expected[tenancy.node] += 1
    for node in reversed(nodes):
        expected[node.parent] += expected[node]
    for node, count in expected.items():
        if node.lock_ref != count:
            raise LedgerError(f"{_name(node)} is locked by {count} tenancies")
        if node.on_host and count:
            raise LedgerError(f"{_name(node)} is locked in host memory")
    evictable = sum(len(node.slots) for node in nodes if node.lock_ref == 0 and not node.on_host)
    if ledger.evictable_tokens != evictable:
        raise LedgerError(f"evictable_tokens is {ledger.evictable_tokens}, the tree has {evictable}")


def _check_order(order: EvictionOrder, nodes: list[Node]) -> None:
    """Of one memory's nodes."""
    unlocked = [(node.serial, node) for node in nodes if node.lock_ref == 0]
    expected = sorted(unlocked, key=lambda entry: entry[0])
    if list(order) != expected:
        raise LedgerError("the eviction order is not that of the unlocked nodes by serial")
    for _, node in expected:
        parent = node.parent
        if (
            parent.parent is not None
            and parent.on_host == node.on_host
            and parent.lock_ref == 0
            and parent.serial <= node.serial
        ):
            raise LedgerError(f"{_name(node)} is younger than its parent")


def _check_pages(ledger: Ledger, nodes: list[Node]) -> None:
    owners: list[Node | Tenancy | str] = ["free", *nodes]
    runs = [ledger.allocator.free_slots, *(node.slots for node in nodes)]
    for tenancy in ledger.tenancies:
        if tenancy is not None:
            owners.append(tenancy)
            runs.append(ledger.table[tenancy.row, tenancy.shared : tenancy.allocated])
    _check_each_page(ledger.allocator, ledger.capacity, runs, owners)


def _check_host_pages(host: HostTier, nodes: list[Node]) -> None:
    runs = [host.allocator.free_slots, host.leaving_slots, *(node.slots for node in nodes)]
    _check_each_page(host.allocator, host.capacity, runs, ["free", "leaving", *nodes])
    cached = sum(len(node.slots) for node in nodes)
    if host.cached_tokens != cached:
        raise LedgerError(f"host memory is said to have {host.cached_tokens} tokens, the tree has {cached} there")


def _check_each_page(
    allocator: TokenToKVPoolAllocator, capacity: int, runs: list[np.ndarray], owners: list[Node | Tenancy | str]
) -> None:
    """Each page of a memory must be in one of `runs`, once; `owners` says whose they are."""
    page_size = allocator.page_size
    pages = np.concatenate(runs).reshape(-1, page_size)
    owner = np.repeat(np.arange(len(runs)), [len(run) // page_size for run in runs])
    numbers, offsets = np.divmod(pages, page_size)
    num_pages = capacity // page_size
    wrong = (offsets != np.arange(page_size)) | (numbers != numbers[:, :1]) | (numbers < 1) | (numbers > num_pages)
    for index in np.flatnonzero(wrong.any(axis=1)):
        raise LedgerError(f"slots {pages[index]} are not a page of the pool and are {_place(owners[owner[index]])}")
    times = np.bincount(numbers[:, 0], minlength=num_pages + 1)
    for page in np.flatnonzero(times[1:] != 1) + 1:
        found = [_place(owners[index]) for index in owner[numbers[:, 0] == page]]
        raise LedgerError(f"page {page} must be in one place; it is {' and '.join(found) or 'nowhere'}")
