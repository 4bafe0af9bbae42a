"""Shared: a finished request as OpenTelemetry spans, one for it and one for each stretch of its way.

Spans are made after the fact, from the timeline, so a request on its way costs nothing; a thread of OpenTelemetry's
sends them.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping
from itertools import pairwise

from srt.observe.timeline import NAMES, Timeline

SERVICE = "lockstep"


def is_available() -> bool:
    """Whether the packages are there."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Tracer:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` takes OTLP over HTTP, like http://collector:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._inside = set_span_in_context

    def ended(self, timeline: Timeline, traceparent: str, attributes: Mapping[str, str | int]) -> None:
        """`traceparent` is the client's header of W3C Trace Context, or empty."""
        context = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        zero = time.time_ns() - time.monotonic_ns()
        marks = [zero + round(mark * 1e9) for mark in timeline.marks()]
        whole = self._tracer.start_span(
            "request", context=context, kind=self._kind, attributes=attributes, start_time=marks[0]
        )
        inside = self._inside(whole)
        for name, (begin, end) in zip(NAMES, pairwise(marks), strict=True):
            if end > begin:
                self._tracer.start_span(name, context=inside, start_time=begin).end(end)
        if timeline.gone:
            gone = zero + round(timeline.gone * 1e9)
            whole.add_event("client gone", timestamp=gone)
            whole.end(gone)
        else:
            whole.end(marks[-1])

    def close(self, patience: float) -> None:
        """Sends what is left, if that takes no longer than `patience` seconds."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)  # it tries for long, and cannot be told
        sending.start()
        sending.join(patience)
