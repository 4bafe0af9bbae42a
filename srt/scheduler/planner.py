"""L2, each rank: decides what the next step computes. Owns the running list; who waits is the queue's.

Everything here is arithmetic on lengths; no token's value is looked at, so a step is planned while the one before it
still runs. Decode rows come first, those with a draft last among them, and all run but those whose length waits for the
outcome of a draft. Prompt chunks come next, those of running requests before those of waiting ones. How many of their
tokens fit beside decode rows is a question of whose wait counts more (`_room`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from radix import Ledger, Tenancy
from srt.scheduler.cache_share import CacheShare
from srt.scheduler.policy import WaitingQueue
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import NO_TOKENS, Copies, Draft, OpenedRow, ScheduleBatch, SharedPrefix

# The share of the tokens that running requests may still generate which admission keeps free for them. It starts high,
# decays as steps pass without trouble, and jumps when memory ran out after all. Who may generate more than RESERVE_MOST
# mostly does so because the client set no limit, and stops long before.
RESERVE_START, RESERVE_LEAST, RESERVE_DECAY, RESERVE_JUMP = 0.7, 0.1, 0.997, 0.2
RESERVE_MOST = 4096

# A step that computes prompts keeps every decode row waiting. So beside these it has this share of the token budget,
# and no less than so many tokens, decode rows included (but half of it at least for prompts). With a GPU's budget it
# then lasts about three times as long as without. But while those who wait for their first token are as many as a
# crowd, and at least this share of those who decode, it is the other way round: their prompts are through soonest in
# whole steps.
BESIDE_DECODE, BESIDE_LEAST = 3 / 32, 64
CROWD, CROWD_SHARE = 4, 0.5

DRAFT_MOST = 16
"""Tokens of a row's draft in one step."""

PREEMPTED_MOST = 4
"""How often a request may have been retracted and still give way to a more urgent one."""

SHARED_LEAST = 1024
"""Tokens whose K/V need not be read again, from which on rows are worth a group of their own."""


class Plan(NamedTuple):
    batch: ScheduleBatch
    requests: list[Request]  # whose rows they are, in the batch's order
    drafts: dict[int, Draft]  # by place among them


class Planner:
    """`token_budget` bounds the tokens of one step, decode rows included, as long as one prompt token gets through."""

    def __init__(self, ledger: Ledger, waiting: WaitingQueue, token_budget: int, max_running: int) -> None:
        self.waiting = waiting
        self.running: list[Request] = []  # in order of admission
        self.retractions = 0
        self._ledger = ledger
        self._token_budget = token_budget
        self._max_running = max_running
        self._reserve_ratio = RESERVE_START
        self._cache_share = CacheShare(ledger.capacity)
        self._claimant: Request | None = None  # was refused what less urgent requests have
        self._neighbours = Neighbours(ledger)
        self._step = 0

    def release(self, request: Request) -> None:
        """Gives back what a finished request holds. Its computed prefix stays in the tree, without the last token."""
        assert request.finish is not None
        assert request.in_flight == 0
        self.running.remove(request)
        computed = min(request.planned, request.num_tokens - 1)
        self._ledger.close(request.tenancy, request.key(computed))
        request.tenancy = None

    def next_batch(self) -> Plan | None:
        """The next step; None if there is nothing to compute or memory must first come back from a step in flight."""
        if self._claimant is not None:
            if self._in_flight():
                return None
            self._make_way(self._claimant)
            self._claimant = None
        decode, prefill = [], []
        for request in self.running:
            if request.wants_forward:
                (decode if request.num_uncomputed == 1 else prefill).append(request)
        num_waiting = min(len(self.waiting), self._max_running - len(self.running))
        admitted = self._admit()
        while not self._grow(decode):
            if self._in_flight():
                return None
            victim = self._victim()
            self._retract(victim)
            self._reserve_ratio = min(1.0, self._reserve_ratio + RESERVE_JUMP)
            (decode if victim in decode else prefill).remove(victim)
            admitted = iter(())
        num_running = len(self.running)
        budget = self._room(len(decode), len(prefill) + num_waiting)
        # Each of these is sampled, and the device has memory for the logits of as many rows as may run.
        unsure = max(DRAFT_MOST, self._max_running - num_running - num_waiting)
        plain, drafted = self._lay_drafts(decode, unsure)
        unsure -= sum(draft.unsure for _, draft in drafted)
        requests = [*self._neighbours.order(plain), *(request for request, _ in drafted)]
        num_decode, num_drafted = len(plain), len(drafted)
        drafts = {num_decode + place: draft for place, (_, draft) in enumerate(drafted)}
        lengths = [1] * num_decode + [1 + len(draft.tokens) for draft in drafts.values()]
        if drafts:
            budget = max(1, min(budget, self._token_budget - sum(lengths)))
        for request in chain(prefill, admitted):
            length = self._chunk(request, budget)
            is_last = request.planned + length == request.length
            if is_last and request.draft.tokens and not request.wants_prompt_logits:
                draft = self._lay_draft(request, budget - length, unsure)
                if draft.tokens:
                    drafts[len(requests)] = draft
                    length += len(draft.tokens)
                    unsure -= draft.unsure
            requests.append(request)
            lengths.append(length)
            budget -= length
            if budget == 0:
                break
        if not requests:
            return None
        self._cache_share.step()
        self._reserve_ratio = max(RESERVE_LEAST, self._reserve_ratio * RESERVE_DECAY)
        batch = self._batch(requests, lengths, num_decode, num_drafted, drafts, self.running[num_running:])
        return Plan(batch, requests, drafts)

    def settle(self, request: Request) -> None:
        """A draft that could be refused is committed: how far the request has come is known, and what was refused is
        given back."""
        assert request.in_flight == 0, "it sat out"
        request.unsure = False
        request.length = request.num_tokens
        request.planned = request.synced = min(request.planned, request.length - 1)
        self._ledger.shrink(request.tenancy, request.planned)

    def _room(self, num_decode: int, num_starting: int) -> int:
        """How many prompt tokens a step may compute."""
        whole = max(1, self._token_budget - num_decode)
        if num_decode == 0 or num_starting >= max(CROWD, CROWD_SHARE * num_decode):
            return whole
        share = max(int(self._token_budget * BESIDE_DECODE), BESIDE_LEAST)
        return min(whole, max(share - num_decode, share // 2))

    def _in_flight(self) -> bool:
        """Requests are retracted only with nothing in flight: no launched step still writes to the freed slots."""
        return any(request.in_flight for request in self.running)

    def _grow(self, decode: list[Request]) -> bool:
        """Gives decode rows the slots of their next tokens; False, with nothing changed, if there are too few.

        It comes before admission, which would take the same pages. Prompts have had theirs since they were admitted.
        """
        short = [request.tenancy for request in decode if request.planned == request.tenancy.allocated]
        if len(short) * self._ledger.page_size > self._ledger.available_tokens:
            return False
        self._ledger.grow_all(short, [tenancy.allocated + 1 for tenancy in short])
        return True

    def _victim(self) -> Request:
        """Of the running requests the least urgent, of these those with the fewest outputs, of these the youngest."""
        assert len(self.running) > 1, "the limits at the door admit nothing that does not fit alone"
        return min(self.running, key=self._retracted_first)

    def _retracted_first(self, request: Request) -> tuple[int, int, int]:
        return self.waiting.urgency(request), request.num_output, -request.serial

    def _retract(self, victim: Request) -> None:
        """It gives its memory back and waits again."""
        self.running.remove(victim)
        self._ledger.close(victim.tenancy, None)
        victim.tenancy = None
        victim.planned = victim.synced = 0
        victim.num_retractions += 1
        self.waiting.add(victim)
        self.retractions += 1

    def retract_all(self) -> None:
        """All give their memory back and wait again."""
        assert not self._in_flight()
        for request in list(self.running):
            self._retract(request)

    def _admit(self) -> Iterator[Request]:
        """Moves waiting requests to the running ones, one each time it is asked, if all its slots can be had now."""
        growth = self._growth() if self.waiting and len(self.running) < self._max_running else 0
        while self.waiting and len(self.running) < self._max_running and not self._holds_back():
            request = self.waiting.first()
            growth += min(request.max_growth, RESERVE_MOST)
            length = request.length
            reserve = self._reserve(growth)
            tenancy = self._ledger.open(request.namespace, request.key(request.most_cached), length, reserve)
            if tenancy is None:
                break
            self.waiting.admit(request)
            self.running.append(request)
            request.tenancy = tenancy
            request.planned = tenancy.cached_tokens
            self._cache_share.admitted(tenancy.revived, length - tenancy.cached_tokens)
            if request.cached_tokens < 0:
                request.cached_tokens = tenancy.cached_tokens
                request.restored_tokens = tenancy.restored
            yield request
        if self.waiting and self.waiting.preemptive and self._less_urgent(self.waiting.first()):
            self._claimant = self.waiting.first()

    def _holds_back(self) -> bool:
        """Requests wait for memory that is more useful with what is cached in it, as long as any run."""
        spares = (
            not self.waiting.follows_cache
            or self._ledger.host is not None
            or self._cache_share.spares(self._ledger.available_tokens)
        )
        return not spares and bool(self.running)

    def _growth(self) -> int:
        return sum(min(request.max_growth, RESERVE_MOST) for request in self.running)

    def _reserve(self, growth: int) -> int:
        """What is kept free for tokens to come; nothing if it would be for the request alone that asks."""
        return int(growth * self._reserve_ratio) if self.running else 0

    def _less_urgent(self, claimant: Request) -> list[Request]:
        """The running requests that give way to it, the first to go first."""
        urgency = self.waiting.urgency
        victims = [
            request
            for request in self.running
            if urgency(request) < urgency(claimant) and request.num_retractions < PREEMPTED_MOST
        ]
        return sorted(victims, key=self._retracted_first)

    def _make_way(self, claimant: Request) -> None:
        """Retracts less urgent requests until the claimant, if it still waits and would be next, finds a place."""
        if not self.waiting or self.waiting.first() is not claimant:
            return
        for victim in self._less_urgent(claimant):
            if len(self.running) < self._max_running and self._fits(claimant):
                return
            self._retract(victim)

    def _fits(self, request: Request) -> bool:
        reserve = self._reserve(self._growth() + min(request.max_growth, RESERVE_MOST))
        return self._ledger.fits(request.namespace, request.key(request.most_cached), request.length, reserve)

    def _chunk(self, request: Request, budget: int) -> int:
        """How much of its prompt a request computes in this step. It enters the tree at once.

        Steps take effect in order, and within one all K/V is stored before any row attends: so who is admitted next,
        even to the same step, may share it. The last token stays out: everybody computes that one for himself, and
        nobody may write to where others read. A prompt whose logits are wanted is computed again where it is cached
        already, so it is handed over at its end only.
        """
        if request.wants_prompt_logits:
            return min(budget, request.num_uncomputed)
        tenancy, key = request.tenancy, request.key(request.length - 1)
        changed = self._ledger.adopt(tenancy, key)
        request.synced = min(request.synced, changed)
        request.planned = max(request.planned, tenancy.shared)
        length = min(budget, request.num_uncomputed)
        self._ledger.share(tenancy, key[: 4 * (request.planned + length)])
        return length

    def _lay_drafts(self, decode: list[Request], unsure: int) -> tuple[list[Request], list[tuple[Request, Draft]]]:
        """The decode rows without a draft in this step, and those with one."""
        if not [request for request in decode if request.drafts]:
            return decode, []
        room = (self._token_budget - len(decode)) // 2
        plain, drafted = [], []
        for request in decode:
            draft = self._lay_draft(request, room, unsure)
            if draft.tokens:
                drafted.append((request, draft))
                room -= len(draft.tokens)
                unsure -= draft.unsure
            else:
                plain.append(request)
        return plain, drafted

    def _lay_draft(self, request: Request, room: int, unsure: int) -> Draft:
        """What of its draft a request computes in this step, at most `room` tokens, `unsure` ones of these, and the
        slots for it.

        After a draft that may be refused its row sits out one step, so among others it must save two. No draft is worth
        memory that a running row may need for its next token.
        """
        draft = request.draft_ahead(min(room, DRAFT_MOST), unsure, 2 if len(self.running) > 1 else 1)
        end = request.length + len(draft.tokens)
        pages = self._ledger.pages_to_grow(request.tenancy, end)
        if pages and (pages + len(self.running)) * self._ledger.page_size > self._ledger.available_tokens:
            return Draft()
        self._ledger.grow(request.tenancy, end)
        return draft

    def _batch(
        self,
        requests: list[Request],
        lengths: list[int],
        num_decode: int,
        num_drafted: int,
        drafts: dict[int, Draft],
        opened: list[Request],
    ) -> ScheduleBatch:
        """Moves the requests' lengths on and freezes it all."""
        row = np.array([request.tenancy.row for request in requests], np.int32)
        start = np.array([request.planned for request in requests], np.int32)
        table_start = np.array([request.synced for request in requests], np.int32)
        length = np.array(lengths, np.int32)
        end = start + length
        samples = (end == np.array([request.length for request in requests], np.int32)).astype(np.int32)
        for request, planned, is_last in zip(requests, end.tolist(), samples.tolist(), strict=True):
            request.planned = request.synced = planned
            request.length += is_last
            request.in_flight += 1
        draft = self._draft(requests, drafts, samples, end) if drafts else NO_TOKENS
        first_logit = end - samples
        for index in range(num_decode, len(requests)):
            request = requests[index]
            if request.wants_prompt_logits:
                first_logit[index] = min(first_logit[index], max(start[index], request.logits_from))
                request.logits_from = max(request.logits_from, int(end[index]))
        # The table's entries [table_start, end) of each row, all at once: `line` is the row, `position` the column.
        counts = end - table_start
        line = row.repeat(counts)
        position = np.arange(len(line)) + (end - counts.cumsum()).repeat(counts)
        copies = self._ledger.take_copies()
        self._step += 1
        return ScheduleBatch(
            step=self._step,
            opened=tuple(
                OpenedRow(r.tenancy.row, r.token_array(), r.prompt_len, r.sampling, r.stop_token_ids, r.rid)
                for r in opened
            ),
            num_decode=num_decode,
            row=row,
            start=start,
            length=length,
            first_logit=first_logit,
            samples=samples,
            table_start=table_start,
            slots=self._ledger.table[line, position],
            shared=self._neighbours.shared,
            num_drafted=num_drafted,
            draft=draft,
            copies=copies and Copies(*copies),
        )

    def _draft(
        self, requests: list[Request], drafts: dict[int, Draft], samples: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """The drafts as the batch has them. Their rows' lengths move on by what is sure; all the rest is sampled."""
        entries = []
        for index, (tokens, certain) in drafts.items():
            request = requests[index]
            samples[index] = 1 + len(tokens) - certain
            request.length += 1 + certain
            request.unsure = len(tokens) > certain
            row, first = request.tenancy.row, int(end[index]) - len(tokens)
            entries += [(row, first + offset, token) for offset, token in enumerate(tokens)]
        return np.array(entries, np.int32).T.copy()


class Neighbours:
    """Which decode rows of a step share a prefix. As long as the rows are the same, so is the answer."""

    def __init__(self, ledger: Ledger) -> None:
        self.shared: tuple[SharedPrefix, ...] = ()
        self._ledger = ledger
        self._tenancies: list[Tenancy] = []
        self._order: list[int] = []

    def order(self, decode: list[Request]) -> list[Request]:
        """The rows, with those of a group side by side at the front."""
        tenancies = [request.tenancy for request in decode]
        if tenancies != self._tenancies:
            trunks = self._ledger.trunks(tenancies, SHARED_LEAST)
            grouped = dict.fromkeys(index for trunk in trunks for index in trunk.members)
            alone = [index for index in range(len(decode)) if index not in grouped]
            self._tenancies, self._order = tenancies, [*grouped, *alone]
            self.shared = tuple(SharedPrefix(len(trunk.members), trunk.tokens) for trunk in trunks)
        return [decode[index] for index in self._order] if self.shared else decode
