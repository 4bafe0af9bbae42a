"""L4, each rank: the seam between a step and the kernels that compute attention over the paged K/V."""

from __future__ import annotations

from typing import Protocol

from srt.executor.forward_batch import ForwardBatch
from srt.layers.attention import Attend


class AttentionBackend(Protocol):
    def plan(self, batch: ForwardBatch) -> Attend:
        """Prepares once per step what all layers share (indices, masks, schedules) and returns what the layers call."""
