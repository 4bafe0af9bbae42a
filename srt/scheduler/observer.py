"""L2, each rank: shows on the board how the ledger stands, so that the main process can tell without asking; and lets
the log of cached pages, where there is one, know that a step is over."""

from __future__ import annotations

from collections.abc import Collection

from radix import Ledger
from srt.scheduler.interfaces import PageLog, Record
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.request import Request

NO_HOST = {"host_total": 0, "host_used": 0, "saved_tokens_total": 0, "restored_tokens_total": 0}


class BoardObserver:
    def __init__(
        self, record: Record, planner: Planner, output: Output, ledger: Ledger, page_log: PageLog | None = None
    ) -> None:
        self._record = record
        self._planner = planner
        self._output = output
        self._ledger = ledger
        self._page_log = page_log

    def step(self, unready: Collection[Request]) -> None:
        planner, output, ledger = self._planner, self._output, self._ledger
        self._record.gauges(
            running=len(planner.running),
            waiting=len(planner.waiting) + len(unready),
            waiting_tokens=planner.waiting.num_tokens + sum(request.length for request in unready),
            pool_total=ledger.capacity,
            pool_free=ledger.free_tokens,
            pool_cached=ledger.cached_tokens,
            pool_locked=ledger.locked_tokens,
            prompt_tokens_total=output.prompt_tokens,
            cached_tokens_total=output.cached_tokens,
            generated_tokens_total=output.generated_tokens,
            evicted_tokens_total=ledger.evicted_total,
            retractions_total=planner.retractions,
            finished_total=output.finished,
            aborted_total=output.aborted,
            drafts_total=output.drafts,
            drafted_tokens_total=output.drafted_tokens,
            accepted_draft_tokens_total=output.accepted_draft_tokens,
            **self._host(),
        )
        if self._page_log is not None:
            self._page_log.step()

    def _host(self) -> dict[str, int]:
        host = self._ledger.host
        if host is None:
            return NO_HOST
        return {
            "host_total": host.capacity,
            "host_used": host.cached_tokens,
            "saved_tokens_total": host.saved_total,
            "restored_tokens_total": host.restored_total,
        }
