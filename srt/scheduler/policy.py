"""L2, each rank: who of the waiting requests is admitted next. Owns the waiting queue and the orders it may have.

An order costs microseconds for each request that comes or goes and for each question, however many wait: nothing here
looks at the whole queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from radix import Ledger
from srt.scheduler.families import Branch, Families
from srt.scheduler.request import Request

OVERTAKINGS = 15
"""How many requests in a row may be admitted before the one that has waited longest must be. With n older ones in the
queue a request is so overtaken at most OVERTAKINGS * (n + 1) times."""

RECHECKED = 16
"""How many requests are matched again at most, because of evictions, before one is taken."""

HEAVIEST_OF = 64
"""Among how many branches of a family the heaviest is looked for: the oldest ones."""

FIRST = -(2**62)
"""The rank of a request that ran already and was retracted."""


class Order(Protocol):
    """The requests that wait, and which of them comes first. Only that one may leave by being admitted."""

    preemptive: bool
    """Whether a request may take the place of one that runs and is less urgent."""

    follows_cache: bool
    """Whether what is cached is served first, so that to leave room for it pays."""

    def urgency(self, request: Request) -> int: ...

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request, admitted: bool) -> None: ...

    def first(self) -> Request:
        """Of at least one."""


class Ranking:
    """Requests sorted by an integer given with each, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []
        self._ranks: dict[int, int] = {}  # by serial

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def first(self) -> Request:
        return self._entries[0][2]

    def add(self, request: Request, rank: int = 0) -> None:
        self._ranks[request.serial] = rank
        insort(self._entries, (rank, request.serial, request))

    def rank(self, request: Request) -> int:
        return self._ranks[request.serial]

    def remove(self, request: Request) -> None:
        rank = self._ranks.pop(request.serial)
        del self._entries[bisect_left(self._entries, (rank, request.serial))]


class ByUrgency:
    """The most urgent first. `sign` is 1 if high priorities are urgent, -1 if low ones are, 0 if none are: fcfs."""

    def __init__(self, sign: int) -> None:
        self.preemptive = sign != 0
        self.follows_cache = False
        self._sign = sign
        self._ranking = Ranking()

    def urgency(self, request: Request) -> int:
        return self._sign * request.priority

    def add(self, request: Request) -> None:
        self._ranking.add(request, -self.urgency(request))

    def remove(self, request: Request, admitted: bool) -> None:
        self._ranking.remove(request)

    def first(self) -> Request:
        return self._ranking.first()


class LongestPrefixMatch:
    """The one with the most cached tokens first; retracted ones before all others.

    Who comes is matched once, and what it found is evicted after what nobody waits for. From then on a match can grow
    by what others bring into the tree: then the oldest of those that share most with the one that was admitted is
    matched again, and when it is gone the next. It can shrink by evictions: then it is noticed when the request has
    come first.
    """

    preemptive = False
    follows_cache = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ranking = Ranking()
        self._families = Families()
        self._grown: list[Branch] = []  # of which one request has been admitted since

    def urgency(self, request: Request) -> int:
        return 0

    def add(self, request: Request) -> None:
        self._families.add(request)
        self._ranking.add(request, self._rank(request, self._ledger.touch))

    def remove(self, request: Request, admitted: bool) -> None:
        self._ranking.remove(request)
        branch = self._families.remove(request)
        if branch.parent is None:
            return
        if admitted:
            self._grown.append(branch)
        else:  # who knows how many leave before another one is admitted
            self._match_again(branch.oldest())

    def first(self) -> Request:
        for branch in self._grown:
            branch = branch.inhabited()
            if branch.parent is not None:
                self._match_again(branch.oldest())
        self._grown.clear()
        for _ in range(RECHECKED):
            request = self._ranking.first()
            if not self._match_again(request):
                break
        return self._ranking.first()

    def _rank(self, request: Request, match: Callable[[bytes, bytes], int]) -> int:
        if request.num_retractions:
            return FIRST
        return -match(request.namespace, request.key(request.most_cached))

    def _match_again(self, request: Request) -> bool:
        """Whether its rank is another now."""
        rank = self._rank(request, self._ledger.peek)
        if rank == self._ranking.rank(request):
            return False
        self._ranking.remove(request)
        self._ranking.add(request, rank)
        return True


class DepthFirst:
    """Through the tree of the waiting prompts: whoever shares most with the one before, in the largest family first.

    At a branch its sub-branches come before those whose prompts end there, the one with the most requests first;
    retracted requests before all others.
    """

    preemptive = False
    follows_cache = False

    def __init__(self) -> None:
        self._retracted = Ranking()
        self._families = Families()
        self._place = self._families.root

    def urgency(self, request: Request) -> int:
        return 0

    def add(self, request: Request) -> None:
        if request.num_retractions:
            self._retracted.add(request)
        else:
            self._families.add(request)

    def remove(self, request: Request, admitted: bool) -> None:
        if request.num_retractions:
            self._retracted.remove(request)
            return
        branch = self._families.remove(request)
        if admitted:
            self._place = branch

    def first(self) -> Request:
        if self._retracted:
            return self._retracted.first()
        branch = self._place = self._place.inhabited()
        while branch.children:
            branch = max(islice(branch.children.values(), HEAVIEST_OF), key=lambda child: len(child.requests))
        return branch.oldest()


class WaitingQueue:
    """Requests in an order, and the promise that none waits for ever."""

    def __init__(self, order: Order) -> None:
        self.num_tokens = 0
        self.preemptive = order.preemptive
        self.follows_cache = order.follows_cache
        self.urgency = order.urgency
        self._order = order
        self._arrivals = Ranking()
        self._overtakings = 0  # since one was admitted that had waited longest

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival."""
        return iter(self._arrivals)

    def add(self, request: Request) -> None:
        self.num_tokens += request.length
        self._arrivals.add(request)
        self._order.add(request)

    def first(self) -> Request:
        """Who is to be admitted next, of at least one."""
        return self._arrivals.first() if self._overtakings == OVERTAKINGS else self._order.first()

    def admit(self, request: Request) -> None:
        """The first one leaves, since it runs."""
        overtakes = request is not self._arrivals.first()
        self._overtakings = self._overtakings + 1 if overtakes else 0
        self._remove(request, admitted=True)

    def withdraw(self, request: Request) -> None:
        """One leaves, since it has ended."""
        self._remove(request, admitted=False)

    def _remove(self, request: Request, admitted: bool) -> None:
        self.num_tokens -= request.length
        self._arrivals.remove(request)
        self._order.remove(request, admitted)


def make_queue(policy: str, ledger: Ledger, low_priority_first: bool = False) -> WaitingQueue:
    match policy:
        case "fcfs":
            order: Order = ByUrgency(0)
        case "priority":
            order = ByUrgency(-1 if low_priority_first else 1)
        case "lpm":
            order = LongestPrefixMatch(ledger)
        case "dfs-weight":
            order = DepthFirst()
        case _:
            raise AssertionError(policy)
    return WaitingQueue(order)
