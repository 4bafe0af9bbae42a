"""L2, each rank: in which order waiting requests are admitted. Each order is total: it ends in the arrival serial."""

from __future__ import annotations

from collections.abc import Callable

from radix import Ledger
from srt.scheduler.request import Request

Order = Callable[[list[Request], Ledger], list[Request]]

MATCHED_QUEUE = 128
"""Longest queue that is matched against the tree every step; behind it requests keep their order of arrival."""


def first_come_first_served(waiting: list[Request], ledger: Ledger) -> list[Request]:
    return waiting


def longest_prefix_match(waiting: list[Request], ledger: Ledger) -> list[Request]:
    head, tail = waiting[:MATCHED_QUEUE], waiting[MATCHED_QUEUE:]
    matched = [(-ledger.peek(r.namespace, r.key(r.length - 1)), r.serial, r) for r in head]
    matched.sort(key=lambda entry: entry[:2])
    return [request for _, _, request in matched] + tail


ORDERS: dict[str, Order] = {"fcfs": first_come_first_served, "lpm": longest_prefix_match}
