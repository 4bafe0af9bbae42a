"""L2, each rank: puts a scheduler together, from all that its decisions follow from beside inboxes and tokens."""

from __future__ import annotations

import math

from radix import Ledger
from srt.messages import Message
from srt.scheduler.consensus import BoardConsensus
from srt.scheduler.control import Control, NoMaintenance
from srt.scheduler.interfaces import Drafter, Executor, Grammars, Intake, Maintenance, Outlet, PageLog, Record
from srt.scheduler.observer import BoardObserver
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.policy import make_queue
from srt.scheduler.scheduler import Scheduler


class Settings(Message):
    """Equal on ranks that are to decide alike."""

    num_pages: int
    page_size: int
    num_rows: int
    context_length: int
    cache_enabled: bool
    policy: str
    low_priority_first: bool
    token_budget: int
    overlap: bool
    eos_token_ids: tuple[int, ...]
    token_bytes: tuple[bytes, ...]  # by id
    is_special: bytes  # by id
    host_pages: int = 0  # of the cache's second tier; 0: there is none
    restore_least: int = 1  # the least tokens that are copied back from there
    waiting_timeout: float = math.inf  # seconds


def assemble(
    settings: Settings,
    *,
    executor: Executor,
    intake: Intake,
    outlet: Outlet,
    record: Record,
    grammars: Grammars | None = None,
    drafter: Drafter | None = None,
    page_log: PageLog | None = None,
    maintenance: Maintenance | None = None,
) -> Scheduler:
    """Without `grammars` no request may bring one."""
    ledger = Ledger(
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        num_rows=settings.num_rows,
        context_length=settings.context_length,
        cache_enabled=settings.cache_enabled,
        host_pages=settings.host_pages,
        restore_least=settings.restore_least,
        observer=page_log,
    )
    waiting = make_queue(settings.policy, ledger, settings.low_priority_first)
    planner = Planner(ledger, waiting, settings.token_budget, settings.num_rows)
    output = Output(settings.token_bytes, settings.is_special)
    observer = BoardObserver(record, planner, output, ledger, page_log)
    observer.step(())
    return Scheduler(
        ledger=ledger,
        planner=planner,
        output=output,
        executor=executor,
        intake=intake,
        outlet=outlet,
        consensus=BoardConsensus(record, planner, output, ledger),
        observer=observer,
        grammars=grammars,
        control=Control(ledger, planner, outlet, maintenance or NoMaintenance()),
        drafter=drafter,
        eos_token_ids=settings.eos_token_ids,
        overlap=settings.overlap,
        waiting_timeout=settings.waiting_timeout,
    )
