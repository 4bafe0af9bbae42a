"""L2, each rank: the loop. Every rank runs exactly this, on the same inboxes, to the same decisions.

Owns the life of a request between its inbox and its last token. What a step computes is the planner's, where K/V
lives the ledger's, what a token means the output's.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import msgspec

from radix import Ledger
from srt.messages import AbortRequest, GrammarReady, Inbox, InboxItem, NewRequest
from srt.scheduler.control import Control
from srt.scheduler.interfaces import Consensus, Drafter, Executor, Grammars, Intake, Observer, Outlet
from srt.scheduler.output import Output
from srt.scheduler.planner import Plan, Planner
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Accepted, Draft, StepResult, TokenMasks

UNCONSTRAINED = Accepted(ends=False)


class Launched(NamedTuple):
    plan: Plan
    handle: Any  # the executor's


class Scheduler:
    def __init__(
        self,
        *,
        ledger: Ledger,
        planner: Planner,
        output: Output,
        executor: Executor,
        intake: Intake,
        outlet: Outlet,
        consensus: Consensus,
        observer: Observer,
        grammars: Grammars | None,
        control: Control,
        drafter: Drafter | None,
        eos_token_ids: tuple[int, ...],
        overlap: bool,
        waiting_timeout: float = math.inf,
    ) -> None:
        """`waiting_timeout` is in seconds of the inboxes' clock."""
        self.stopped = False
        self._ledger = ledger
        self._planner = planner
        self._output = output
        self._executor = executor
        self._intake = intake
        self._outlet = outlet
        self._consensus = consensus
        self._observer = observer
        self._grammars = grammars
        self._control = control
        self._drafter = drafter
        self._eos_token_ids = eos_token_ids
        self._overlap = overlap
        self._waiting_timeout = waiting_timeout
        self._arrivals: deque[tuple[float, int]] = deque()  # if they may be late: when they were heard, and rids
        self._decoder = msgspec.msgpack.Decoder(InboxItem)
        self._requests: dict[int, Request] = {}  # by rid: all that are not released
        self._unready: dict[int, Request] = {}  # of these, whose grammar is not there yet
        self._serial = 0

    def run(self) -> None:
        prev: Launched | None = None  # launched, its tokens not yet in the ledger
        while not self.stopped:
            idle = prev is None and self._has_nothing_to_plan()
            inbox = self._intake.next(wait=idle and not self._outlet.holds)
            self._admit(inbox)
            plan = None if self._control.paused else self._planner.next_batch()
            assert plan or prev or self._has_nothing_to_plan(), "requests are there, and none can move"
            self._consensus.step(inbox, plan)
            # The device is busy from here on.
            cur = Launched(plan, self._executor.forward(plan.batch)) if plan else None
            self._outlet.release(inbox.number)
            if prev:
                self._commit(prev)  # hidden behind cur's forward
            if cur:
                self._executor.sample(cur.handle, self._masks(cur))  # masks see prev's tokens
            prev = cur
            if prev and not self._overlap:
                self._commit(prev)
                prev = None
            self._control.step(inbox.now, len(self._requests), computed=plan is not None, in_flight=prev is not None)
            # Before the tokens leave: who has an answer finds its request counted.
            self._observer.step(self._unready.values())
            self._outlet.tokens(self._output.take(inbox.number))

    def _has_nothing_to_plan(self) -> bool:
        return self._control.paused or len(self._requests) == len(self._unready)

    # ---- admit ------------------------------------------------------------------------------------------------------

    def _admit(self, inbox: Inbox) -> None:
        for item in inbox.items:
            match self._decoder.decode(item):
                case NewRequest() as message:
                    self._serial += 1
                    request = Request.from_message(message, self._serial, self._eos_token_ids, inbox.now)
                    self._requests[request.rid] = request
                    if self._waiting_timeout < math.inf:
                        self._arrivals.append((inbox.now, request.rid))
                    request.drafts = self._drafter is not None and self._drafter.follows(request)
                    if request.constrained and not self._grammars.open(
                        request.rid, message.grammar, request.sampling.ignore_eos
                    ):
                        self._unready[request.rid] = request
                    else:
                        self._wait(request)
                case GrammarReady(serial=serial):
                    for rid, fault in self._grammars.ready(serial):
                        if fault:
                            self._abort(rid, f"The grammar or schema cannot be enforced: {fault}", 400)
                        else:
                            self._wait(self._unready.pop(rid))
                case AbortRequest(rid=rid, message=reason):
                    self._abort(rid, reason)
                case control:
                    self._control.take(control, inbox.now)
        self._end_late(inbox.now)

    def _end_late(self, now: float) -> None:
        """Ends requests that have waited for their first step too long: their clients will have given up."""
        while self._arrivals:
            came, rid = self._arrivals[0]
            request = self._requests.get(rid)
            waits = request is not None and not request.has_begun
            if waits and now - came < self._waiting_timeout:
                break
            self._arrivals.popleft()
            if waits:
                reason = f"The request could not begin within {self._waiting_timeout:g} s. Try again later."
                self._abort(rid, reason, 503)

    def _wait(self, request: Request) -> None:
        if request.drafts:
            request.draft = self._drafter.draft(request)
        self._planner.waiting.add(request)

    def _abort(self, rid: int, reason: str, status: int = 0) -> None:
        request = self._requests.get(rid)
        if request is None or request.finish is not None:
            return
        self._output.abort(request, reason, status)
        if self._unready.pop(rid, None) is not None:
            self._forget(request)
        elif request.tenancy is None:
            self._planner.waiting.withdraw(request)
            self._forget(request)
        elif request.in_flight == 0:
            self._release(request)

    # ---- commit -----------------------------------------------------------------------------------------------------

    def _masks(self, launched: Launched) -> TokenMasks | None:
        """What is drawn for a request that has finished meanwhile is dropped, so it needs no mask."""
        batch, requests, drafts = launched.plan
        rows = [i for i, r in enumerate(requests) if r.constrained and r.finish is None and batch.samples[i]]
        if not rows:
            return None
        places = (batch.samples.cumsum() - batch.samples)[rows].tolist()
        laid = {requests[i].rid: draft for i, draft in drafts.items()}
        return self._grammars.masks(places, [requests[i].rid for i in rows], laid)

    def _commit(self, launched: Launched) -> None:
        """Enters a step's values into the ledger: tokens and finishes; releases what nobody computes."""
        batch, requests, drafts = launched.plan
        result = self._executor.result(launched.handle)
        if result.prompt is not None:
            self._output.prompt(batch, requests, result.prompt)
        tokens, samples = result.tokens.tolist(), batch.samples.tolist()
        self._output.drafts += len(drafts)
        self._output.drafted_tokens += sum([len(draft.tokens) for draft in drafts.values()])
        index = 0
        for i, request in enumerate(requests):
            request.in_flight -= 1
            if request.finish is None and samples[i]:
                if i in drafts:
                    self._take_drafted(request, drafts[i], tokens[index : index + samples[i]], result, index)
                else:
                    self._take(request, tokens[index], result, index)
                if request.drafts and request.finish is None:
                    request.draft = self._drafter.draft(request)
            index += samples[i]
            if request.finish is not None and request.in_flight == 0:
                self._release(request)

    def _take_drafted(self, request: Request, draft: Draft, sampled: list[int], result: StepResult, index: int) -> None:
        """Of what was sampled behind a draft, all up to the first token that is not the draft's, this one included:
        what comes later followed from tokens that were not said."""
        for token in draft.tokens[: draft.certain]:
            self._take(request, token, result, index)
            self._output.accepted_draft_tokens += 1
            if request.finish is not None:
                return
        for place, (token, guess) in enumerate(zip(sampled, (*draft.tokens[draft.certain :], None), strict=True)):
            self._take(request, token, result, index + place)
            self._output.accepted_draft_tokens += token == guess
            if request.finish is not None:
                return
            if token != guess:
                break
        if draft.unsure:
            self._planner.settle(request)

    def _take(self, request: Request, token: int, result: StepResult, index: int) -> None:
        accepted = self._grammars.accept(request.rid, token) if request.constrained else UNCONSTRAINED
        if accepted.fault:
            # It would fail anywhere, so a router must not send it on.
            self._output.abort(request, f"The grammar could not be followed: {accepted.fault}", 400)
        else:
            self._output.token(request, token, result, index, accepted.ends)

    def _release(self, request: Request) -> None:
        self._planner.release(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.rid]
        if request.constrained:
            self._grammars.drop(request.rid)
