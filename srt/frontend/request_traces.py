"""L1, frontend: what a collector of traces is told of each request that has ended."""

from __future__ import annotations

from srt.frontend.generation import Generation
from srt.observe.tracing import Tracer


class RequestTraces:
    """Without an endpoint nothing is told."""

    def __init__(self, endpoint: str | None) -> None:
        self._tracer = None if endpoint is None else Tracer(endpoint)

    def ended(self, generation: Generation) -> None:
        """Its answer is written, or its client has left."""
        if self._tracer is None:
            return
        attributes = {
            "gen_ai.response.id": generation.name,
            "gen_ai.response.finish_reason": "left" if generation.finish is None else generation.finish.reason,
            "gen_ai.usage.input_tokens": generation.prompt.num_tokens,
            "gen_ai.usage.output_tokens": generation.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        }
        self._tracer.ended(generation.timeline, generation.traceparent, attributes)

    def close(self, patience: float) -> None:
        """Sends what is left, if that takes no longer than `patience` seconds."""
        if self._tracer is not None:
            self._tracer.close(patience)
