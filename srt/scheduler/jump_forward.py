"""L2, each rank: the drafter of grammars: where a grammar leaves no choice, what it forces is the draft."""

from __future__ import annotations

from srt.scheduler.interfaces import Forcing
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Draft


class JumpForward:
    def __init__(self, grammars: Forcing) -> None:
        self._grammars = grammars

    def follows(self, request: Request) -> bool:
        return request.constrained

    def draft(self, request: Request) -> Draft:
        return self._grammars.forced(request.rid)
