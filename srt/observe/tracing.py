"""Shared: a finished request as OpenTelemetry spans, one for it and one for each stretch of its way.

Spans are made after the fact, from the timeline, so a request on its way costs nothing. They are made by a thread once
a second, straight in the form in which they are sent: the SDK's own spans would take fifty times as long, a tenth of
all that a short request costs the frontend. Sampling, resource and ids are the SDK's, with its environment variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from srt.observe.timeline import NAMES, Timeline

SERVICE = "lockstep"
PERIOD = 1.0  # seconds between two messages to the collector
MOST_WAITING = 8192  # requests; the oldest are dropped
TIMEOUT = 10.0  # seconds for a collector to answer
HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
NEEDED = ("opentelemetry.sdk", "opentelemetry.proto", "requests")

log = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether the packages are there."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in NEEDED)
    except ModuleNotFoundError:
        return False


class Ended(NamedTuple):
    marks: list[float]
    gone: float  # when its client left before the end, or 0
    traceparent: str
    attributes: Mapping[str, str | int]


class Tracer:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` takes OTLP over HTTP, like http://collector:4318/v1/traces."""
        import requests
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        from opentelemetry.util.re import parse_env_headers
        from requests.adapters import HTTPAdapter, Retry

        self._endpoint = endpoint
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._session = requests.Session()
        self._failure = requests.RequestException
        self._new_message = ExportTraceServiceRequest
        self._propagator = TraceContextTextMapPropagator()
        self._span_in = get_current_span
        self._sampled = Decision.RECORD_AND_SAMPLE
        retry = Retry(3, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504), allowed_methods=None)
        self._session.mount(endpoint, HTTPAdapter(max_retries=retry))
        given = next((os.environ[name] for name in HEADERS if name in os.environ), "")
        self._session.headers.update(parse_env_headers(given, liberal=True))
        self._session.headers["Content-Type"] = "application/x-protobuf"
        self._ended: deque[Ended] = deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def ended(self, timeline: Timeline, traceparent: str, attributes: Mapping[str, str | int]) -> None:
        """`traceparent` is the client's header of W3C Trace Context, or empty."""
        self._ended.append(Ended(timeline.marks(), timeline.gone, traceparent, attributes))

    def close(self, patience: float) -> None:
        """Sends what is left, if that takes no longer than `patience` seconds."""
        self._closing.set()
        self._thread.join(patience)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(PERIOD):
            self._send()
        self._send()

    def _send(self) -> None:
        message = self._new_message()
        resource = message.resource_spans.add()
        for name, value in self._provider.resource.attributes.items():
            _add_attribute(resource.resource.attributes, name, str(value))
        scope = resource.scope_spans.add()
        scope.scope.name = SERVICE
        zero = time.time_ns() - time.monotonic_ns()
        count = 0
        while self._ended:
            self._add(scope.spans, self._ended.popleft(), zero)
            count += 1
        if not scope.spans:
            return
        try:
            self._session.post(self._endpoint, message.SerializeToString(), timeout=TIMEOUT).raise_for_status()
        except self._failure as error:
            log.warning("traces of %d requests are lost: %s", count, error)

    def _add(self, spans: Any, ended: Ended, zero: int) -> None:
        """`zero` is when CLOCK_MONOTONIC was 0, in ns since 1970."""
        context = self._propagator.extract({"traceparent": ended.traceparent})
        parent = self._span_in(context).get_span_context()
        new_id = self._provider.id_generator
        trace = parent.trace_id if parent.is_valid else new_id.generate_trace_id()
        if self._provider.sampler.should_sample(context, trace, "request").decision is not self._sampled:
            return

        def add(name: str, below: bytes, begin: float, end: float) -> Any:
            return spans.add(
                trace_id=trace.to_bytes(16, "big"),
                span_id=new_id.generate_span_id().to_bytes(8, "big"),
                parent_span_id=below,
                name=name,
                start_time_unix_nano=zero + round(begin * 1e9),
                end_time_unix_nano=zero + round(end * 1e9),
            )

        marks = ended.marks
        whole = add(
            "request", parent.span_id.to_bytes(8, "big") if parent.is_valid else b"", marks[0], ended.gone or marks[-1]
        )
        whole.kind = whole.SPAN_KIND_SERVER
        for name, value in ended.attributes.items():
            _add_attribute(whole.attributes, name, value)
        if ended.gone:
            whole.events.add(name="client gone", time_unix_nano=whole.end_time_unix_nano)
        for name, (begin, end) in zip(NAMES, pairwise(marks), strict=True):
            if end > begin:
                add(name, whole.span_id, begin, end).kind = whole.SPAN_KIND_INTERNAL


def _add_attribute(attributes: Any, name: str, value: str | int) -> None:
    added = attributes.add(key=name)
    if isinstance(value, int):
        added.value.int_value = value
    else:
        added.value.string_value = value
