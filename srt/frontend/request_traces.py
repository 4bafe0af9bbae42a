"""L1, frontend: what a collector of traces is told of each request that has ended."""

from __future__ import annotations

from srt.frontend.generation import Generation
from srt.observe.tracing import Ended, Tracer


class RequestTraces:
    """Without an endpoint nothing is told."""

    def __init__(self, endpoint: str | None) -> None:
        self._tracer = None if endpoint is None else Tracer(endpoint)

    def ended(self, generation: Generation) -> None:
        """Its answer is written, or its client has left."""
        if self._tracer is None:
            return
        attributes = (
            generation.name,
            "left" if generation.finish is None else generation.finish.reason,
            generation.prompt.num_tokens,
            generation.completion_tokens,
            generation.cached_tokens,
        )
        self._tracer.ended(Ended(generation.timeline, generation.arrived.traceparent, attributes))

    def close(self, patience: float) -> None:
        """Sends what is left, if that takes no longer than `patience` seconds."""
        if self._tracer is not None:
            self._tracer.close(patience)
