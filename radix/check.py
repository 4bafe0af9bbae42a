"""L3, each rank: proof that the ledger's books balance. Owns nothing; it visits everything, when idle and in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix.tree import TOKEN_BYTES, Node

if TYPE_CHECKING:
    from radix.ledger import Ledger


class LedgerError(Exception):
    """The ledger contradicts itself; the message says where."""


def check_ledger(ledger: Ledger) -> None:
    """Raises LedgerError unless every page is free, cached or held exactly once, and all counts are what they count."""
    nodes = _nodes(ledger)
    _check_nodes(ledger, nodes)
    _check_rows(ledger)
    _check_locks(ledger, nodes)
    _check_order(ledger, nodes)
    _check_pages(ledger, nodes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LedgerError(message)


def _name(node: Node) -> str:
    tokens = np.frombuffer(node.key, np.int32) if node.parent else node.key
    return f"node {tokens!r} (serial {node.serial}, lock_ref {node.lock_ref})"


def _nodes(ledger: Ledger) -> list[Node]:
    """All nodes but the roots, parents before children."""
    nodes = [child for root in ledger.cache.roots.values() for child in root.children.values()]
    for node in nodes:  # grows while it runs
        nodes.extend(node.children.values())
    return nodes


def _check_nodes(ledger: Ledger, nodes: list[Node]) -> None:
    page_bytes = ledger.page_size * TOKEN_BYTES
    for namespace, root in ledger.cache.roots.items():
        _require(root.key == namespace, f"the root of namespace {namespace!r} carries {root.key!r}")
        _require(bool(root.children) or root.lock_ref > 0, f"the root of namespace {namespace!r} is empty")
    for node in [*ledger.cache.roots.values(), *nodes]:
        for first_page, child in node.children.items():
            _require(child.parent is node, f"{_name(child)} has another parent than the node it hangs on")
            _require(child.key[:page_bytes] == first_page, f"{_name(child)} hangs on a wrong first page")
    for node in nodes:
        _require(len(node.key) > 0, f"{_name(node)} is empty")
        _require(len(node.key) % page_bytes == 0, f"{_name(node)} ends within a page")
        _require(len(node.slots) * TOKEN_BYTES == len(node.key), f"{_name(node)} has {len(node.slots)} slots")
    cached = sum(len(node.slots) for node in nodes)
    _require(ledger.cached_tokens == cached, f"cached_tokens is {ledger.cached_tokens}, the tree has {cached}")


def _check_rows(ledger: Ledger) -> None:
    open_rows = [row for row, tenancy in enumerate(ledger.tenancies) if tenancy is not None]
    rows = sorted(ledger.pool.free_rows + open_rows)
    _require(rows == list(range(len(ledger.tenancies))), f"rows free or open: {rows}")
    for row in open_rows:
        tenancy = ledger.tenancies[row]
        _require(tenancy.row == row, f"row {row} has the tenancy of row {tenancy.row}")
        _require(
            0 <= tenancy.shared <= tenancy.allocated <= ledger.table.shape[1],
            f"row {row} shares {tenancy.shared} of {tenancy.allocated} tokens",
        )
        path = []
        node = tenancy.node
        while node.parent is not None:
            path.append(node.slots)
            node = node.parent
        _require(ledger.cache.roots.get(tenancy.namespace) is node, f"row {row} locks a node outside its namespace")
        slots = np.concatenate(path[::-1]) if path else np.empty(0, np.int32)
        _require(
            np.array_equal(ledger.table[row, : tenancy.shared], slots),
            f"row {row} shares {tenancy.shared} tokens but not the slots of its locked path ({len(slots)} tokens)",
        )


def _check_locks(ledger: Ledger, nodes: list[Node]) -> None:
    expected = dict.fromkeys([*ledger.cache.roots.values(), *nodes], 0)
    for tenancy in ledger.tenancies:
        if tenancy is not None:
            expected[tenancy.node] += 1
    for node in reversed(nodes):
        expected[node.parent] += expected[node]
    for node, count in expected.items():
        _require(node.lock_ref == count, f"{_name(node)} is locked by {count} tenancies")
    evictable = sum(len(node.slots) for node in nodes if node.lock_ref == 0)
    _require(
        ledger.evictable_tokens == evictable, f"evictable_tokens is {ledger.evictable_tokens}, the tree has {evictable}"
    )


def _check_order(ledger: Ledger, nodes: list[Node]) -> None:
    order = list(ledger.cache.order)
    expected = sorted((node for node in nodes if node.lock_ref == 0), key=lambda node: node.serial)
    _require(
        len(order) == len(expected) and all(a is b for a, b in zip(order, expected, strict=True)),
        f"the eviction order has {len(order)} nodes, not the {len(expected)} unlocked ones by serial",
    )
    for node in expected:
        if node.parent.parent is not None and node.parent.lock_ref == 0:
            _require(node.serial < node.parent.serial, f"{_name(node)} is younger than its parent")


def _check_pages(ledger: Ledger, nodes: list[Node]) -> None:
    page_size = ledger.page_size
    owners = []
    runs = [("free", "the allocator", ledger.allocator.free_slots)]
    runs += [("cached", _name(node), node.slots) for node in nodes]
    for tenancy in ledger.tenancies:
        if tenancy is not None:
            own = ledger.table[tenancy.row, tenancy.shared : tenancy.allocated]
            runs.append(("held", f"row {tenancy.row}", own))
    for owner, place, slots in runs:
        pages = slots[::page_size] // page_size
        whole = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        _require(np.array_equal(whole, slots), f"the slots of {place} are not whole pages: {slots!r}")
        owners.append((owner, pages))
    num_pages = ledger.capacity // page_size
    times = np.zeros(num_pages + 1, np.int64)
    for owner, pages in owners:
        _require(bool(np.all((pages >= 1) & (pages <= num_pages))), f"{owner} pages outside 1..{num_pages}: {pages!r}")
        np.add.at(times, pages, 1)
    for page in np.flatnonzero(times[1:] != 1) + 1:
        found = [owner for owner, pages in owners if page in pages]
        raise LedgerError(f"page {page} must be in one place and is in {found}")
