"""L2, each rank: decides what the next step computes. Owns the waiting queue and the running list.

Everything here is arithmetic on lengths; no token's value is looked at, so a step is planned while the one before it
still runs. Decode rows come first and always all run; prompt chunks fill the rest of the token budget, those of
running requests before those of waiting ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix import Ledger
from srt.scheduler.policy import Order
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import OpenedRow, ScheduleBatch

# The share of the tokens that running requests may still generate which admission keeps free for them. It starts high,
# decays as steps pass without trouble, and jumps when memory ran out after all.
RESERVE_START, RESERVE_LEAST, RESERVE_DECAY, RESERVE_JUMP = 0.7, 0.1, 0.997, 0.2


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of a launched batch, as commit needs it."""

    request: Request
    end: int  # positions below it are computed once the batch has run
    samples: bool
    is_chunk: bool


@dataclass(frozen=True, slots=True)
class Plan:
    batch: ScheduleBatch
    rows: tuple[PlannedRow, ...]


class Planner:
    """`token_budget` bounds the tokens of one step, decode rows included, as long as one prompt token gets through."""

    def __init__(self, ledger: Ledger, order: Order, token_budget: int, max_running: int) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in order of admission
        self.retractions = 0
        self._ledger = ledger
        self._order = order
        self._token_budget = token_budget
        self._max_running = max_running
        self._reserve_ratio = RESERVE_START
        self._step = 0

    def next_batch(self) -> Plan | None:
        """The next step; None if there is nothing to compute or memory must first come back from a step in flight."""
        decode = [r for r in self.running if r.wants_forward and r.num_uncomputed == 1]
        missing = self._pages_missing(decode)
        if missing > 0 and any(r.in_flight for r in self.running):
            return None  # retract only with nothing in flight: then no launched step still writes to the freed slots
        retracted = missing > 0
        while missing > 0:
            victim = self._retract()
            if victim in decode:
                decode.remove(victim)
            missing = self._pages_missing(decode)
        # Before admission, which would take the same pages. Prompts have had theirs since they were admitted.
        self._ledger.grow_all([r.tenancy for r in decode], [r.planned + 1 for r in decode])

        opened: list[Request] = []
        rows = [(request, 1) for request in decode]
        budget = max(1, self._token_budget - len(decode))
        for request in self.running:
            if budget > 0 and request.wants_forward and request.num_uncomputed > 1:
                length = min(budget, request.num_uncomputed)
                rows.append((request, length))
                budget -= length
        if not retracted:
            while budget > 0 and self.waiting and len(self.running) < self._max_running:
                request = self._admit()
                if request is None:
                    break
                opened.append(request)
                length = min(budget, request.num_uncomputed)
                rows.append((request, length))
                budget -= length
        if not rows:
            return None
        self._reserve_ratio = max(RESERVE_LEAST, self._reserve_ratio * RESERVE_DECAY)
        return self._plan(opened, rows, len(decode))

    def release(self, request: Request) -> None:
        """Gives back what a finished request holds. Its computed prefix stays in the tree, without the last token."""
        assert request.finish is not None
        assert request.in_flight == 0
        self.running.remove(request)
        computed = min(request.planned, request.num_tokens - 1)
        self._ledger.close(request.tenancy, request.key(computed))
        request.tenancy = None

    def _pages_missing(self, decode: list[Request]) -> int:
        """Pages that the decode rows' next tokens need beyond what is free or evictable."""
        ledger = self._ledger
        needed = sum(ledger.pages_to_grow(r.tenancy, r.planned + 1) for r in decode)
        return needed - ledger.available_tokens // ledger.page_size

    def _retract(self) -> Request:
        """Of the running requests with the fewest outputs the youngest gives its memory back and waits again."""
        assert len(self.running) > 1, "the limits at the door admit nothing that does not fit alone"
        victim = min(self.running, key=lambda r: (r.num_output, -r.serial))
        self.running.remove(victim)
        self._ledger.close(victim.tenancy, None)
        victim.tenancy = None
        victim.planned = victim.synced = 0
        victim.num_retractions += 1
        self.waiting.insert(0, victim)
        self.retractions += 1
        self._reserve_ratio = min(1.0, self._reserve_ratio + RESERVE_JUMP)
        return victim

    def _admit(self) -> Request | None:
        """Moves the first waiting request to the running ones if all its prompt's slots can be had now."""
        self.waiting = self._order(self.waiting, self._ledger)
        request = self.waiting[0]
        reserve = 0
        if self.running:
            growth = sum(r.max_remaining for r in self.running) + request.max_remaining
            reserve = int(growth * self._reserve_ratio)
        length = request.num_tokens
        tenancy = self._ledger.open(request.namespace, request.key(length - 1), length, reserve)
        if tenancy is None:
            return None
        del self.waiting[0]
        self.running.append(request)
        request.tenancy = tenancy
        request.planned = tenancy.cached_tokens
        if request.cached_tokens < 0:
            request.cached_tokens = tenancy.cached_tokens
        return request

    def _plan(self, opened: list[Request], rows: list[tuple[Request, int]], num_decode: int) -> Plan:
        """Moves the lengths on and freezes it all."""
        ledger = self._ledger
        planned, columns, slots = [], [], []
        for request, length in rows:
            tenancy, start = request.tenancy, request.planned
            end = start + length
            samples = end == request.num_tokens + request.pending
            columns.append((tenancy.row, start, length, end - samples, samples, request.synced))
            slots.append(ledger.table[tenancy.row, request.synced : end])
            planned.append(PlannedRow(request, end, samples, length > 1 or not samples))
            request.planned = request.synced = end
            request.pending += samples
            request.in_flight += 1
        row, start, length, first_logit, samples, table_start = np.array(columns, np.int32).T.copy()
        self._step += 1
        batch = ScheduleBatch(
            step=self._step,
            opened=tuple(
                OpenedRow(r.tenancy.row, r.token_array(), r.prompt_len, r.sampling, r.stop_token_ids) for r in opened
            ),
            num_decode=num_decode,
            row=row,
            start=start,
            length=length,
            first_logit=first_logit,
            samples=samples.astype(bool),
            table_start=table_start,
            slots=np.concatenate(slots),
        )
        return Plan(batch, tuple(planned))
