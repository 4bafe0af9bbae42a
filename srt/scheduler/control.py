"""L2, each rank: what an administrator asks of a running engine. Owns the pause, and the questions not answered yet.

Questions come in inboxes, and what is done about them depends on nothing else, so all ranks do it at the same step.
"""

from __future__ import annotations

from typing import NamedTuple

from radix import Ledger, outline
from srt.messages import (
    ContinueGeneration,
    ControlItem,
    ControlReply,
    FlushCache,
    PauseGeneration,
    ShowTree,
    StartProfile,
    StopProfile,
    TreeReply,
    UpdateWeights,
)
from srt.scheduler.interfaces import Maintenance, Outlet
from srt.scheduler.planner import Planner


class Flush(NamedTuple):
    ticket: int
    deadline: float  # on the inboxes' clock


class Control:
    def __init__(self, ledger: Ledger, planner: Planner, outlet: Outlet, maintenance: Maintenance) -> None:
        self.paused = False
        self._ledger = ledger
        self._planner = planner
        self._outlet = outlet
        self._maintenance = maintenance
        self._flushes: list[Flush] = []
        self._asked: list[ControlItem] = []  # once nothing is in flight

    def take(self, item: ControlItem, now: float) -> None:
        match item:
            case FlushCache(ticket=ticket, timeout_s=timeout_s):
                self._flushes.append(Flush(ticket, now + timeout_s))
            case PauseGeneration():
                self.paused = True
                self._asked.append(item)
            case ShowTree(ticket=ticket, most_nodes=nodes, most_tokens=tokens):
                self._outlet.reply(TreeReply(ticket, tuple(outline(self._ledger, nodes, tokens))))
            case _ if self._asked:
                self._asked.append(item)
            case _:
                self._answer(item)

    def step(self, now: float, num_requests: int, computed: bool, in_flight: bool) -> None:
        """The step is over, with `num_requests` that wait or run; whether it `computed` anything."""
        if computed:
            self._maintenance.step()
        if self._asked and not in_flight:
            asked, self._asked = self._asked, []
            for item in asked:
                self._answer(item)
        if self._flushes:
            self._flush(now, num_requests)

    def _answer(self, item: ControlItem) -> None:
        fault = ""
        match item:
            case PauseGeneration(retract=retract):
                if retract:
                    self._planner.retract_all()
            case ContinueGeneration():
                self.paused = False
            case StartProfile(folder=folder, num_steps=num_steps):
                fault = self._maintenance.start_profile(folder, num_steps)
            case StopProfile():
                fault = self._maintenance.stop_profile()
            case UpdateWeights(folder=folder):
                fault = self._update_weights(folder)
        self._outlet.reply(ControlReply(item.ticket, not fault, fault))

    def _update_weights(self, folder: str | None) -> str:
        if not self.paused or self._planner.running:
            return "Generation is not paused."
        # Whether or not it succeeds: a replay of the inboxes cannot know.
        self._ledger.flush()
        return self._maintenance.update_weights(folder)

    def _flush(self, now: float, num_requests: int) -> None:
        """Answers the flushes that can be: with yes once nobody has memory, with no once their time is up."""
        if not num_requests or (self.paused and not self._planner.running):
            self._ledger.flush()
            for flush in self._flushes:
                self._outlet.reply(ControlReply(flush.ticket, True, "Cache flushed."))
            self._flushes.clear()
        else:
            overdue = [flush for flush in self._flushes if flush.deadline <= now]
            self._flushes = [flush for flush in self._flushes if flush.deadline > now]
            for flush in overdue:
                reason = f"Cache not flushed: {num_requests} requests are waiting or running."
                self._outlet.reply(ControlReply(flush.ticket, False, reason))


class NoMaintenance:
    """Of an executor that cannot be looked into."""

    def step(self) -> None:
        pass

    def start_profile(self, folder: str, num_steps: int) -> str:
        return "This executor makes no profiles."

    def stop_profile(self) -> str:
        return "This executor makes no profiles."

    def update_weights(self, folder: str | None) -> str:
        return "This executor has no weights."
