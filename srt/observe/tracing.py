"""Shared: a finished request as OpenTelemetry spans, one for it and one for each stretch of its way.

Spans are made after the fact, from the timeline, so a request on its way costs nothing. They are made by a thread, of
all requests that have ended since it last did so, straight in the form in which they are sent: the SDK's own would take
more than a short request costs the frontend otherwise. Sampling, resource and all ids are the SDK's, with its
environment variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from srt.observe.timeline import NAMES, Timeline

SERVICE = "lockstep"
PERIOD = 5.0  # seconds between two messages to the collector, as the SDK's
MOST_WAITING = 16384  # requests; the oldest are dropped
TIMEOUT = 10.0  # seconds for a collector to answer
HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
ATTRIBUTES = (
    "gen_ai.response.id",
    "gen_ai.response.finish_reason",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
)
NEEDED = ("opentelemetry.sdk", "opentelemetry.proto", "requests")

log = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether the packages are there."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in NEEDED)
    except ModuleNotFoundError:
        return False


class Ended(NamedTuple):
    timeline: Timeline
    traceparent: str  # the client's header of W3C Trace Context, or empty
    attributes: tuple[str | int, ...]  # in the order of ATTRIBUTES


class Tracer:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` takes OTLP over HTTP, like http://collector:4318/v1/traces."""
        import requests
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.trace.v1.trace_pb2 import Span
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
        # They are filled in again and again, for one request after the other: new ones would take three times as long.
        attributes = [{"key": name} for name in ATTRIBUTES]
        self._whole = Span(name="request", kind=Span.SPAN_KIND_SERVER, attributes=attributes)
        self._stretches = [Span(name=name, kind=Span.SPAN_KIND_INTERNAL) for name in NAMES]
        self._propagator = TraceContextTextMapPropagator()
        self._span_in = get_current_span
        self._sampled = Decision.RECORD_AND_SAMPLE
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # or it warns of each try; we do once all have failed
        retry = Retry(3, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504), allowed_methods=None)
        self._session.mount(endpoint, HTTPAdapter(max_retries=retry))
        given = next((os.environ[name] for name in HEADERS if name in os.environ), "")
        self._session.headers.update(parse_env_headers(given, liberal=True))
        self._session.headers["Content-Type"] = "application/x-protobuf"
        self._ended: deque[Ended] = deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def ended(self, request: Ended) -> None:
        self._ended.append(request)

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
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        if not ended:
            return
        message = self._new_message()
        resource = message.resource_spans.add()
        for name, value in self._provider.resource.attributes.items():
            _set(resource.resource.attributes.add(key=name).value, str(value))
        scope = resource.scope_spans.add()
        scope.scope.name = SERVICE
        zero = time.time_ns() - time.monotonic_ns()  # when CLOCK_MONOTONIC was 0, in ns since 1970
        for one in ended:
            self._add(scope.spans, one, zero)
        if not scope.spans:
            return
        try:
            self._session.post(self._endpoint, message.SerializeToString(), timeout=TIMEOUT).raise_for_status()
        except self._failure as error:
            log.warning("traces of %d requests are lost: %s", len(ended), error)

    def _add(self, spans: Any, ended: Ended, zero: int) -> None:
        """The spans of one request, if the sampler wants them."""
        given = ended.traceparent
        context = self._propagator.extract({"traceparent": given}) if given else None
        parent = self._span_in(context).get_span_context()
        new_id = self._provider.id_generator
        trace = parent.trace_id if parent.is_valid else new_id.generate_trace_id()
        if self._provider.sampler.should_sample(context, trace, "request").decision is not self._sampled:
            return
        marks = [zero + round(mark * 1e9) for mark in ended.timeline.marks()]
        gone = zero + round(ended.timeline.gone * 1e9) if ended.timeline.gone else 0
        whole = self._whole
        whole.trace_id = trace.to_bytes(16, "big")
        whole.span_id = new_id.generate_span_id().to_bytes(8, "big")
        whole.parent_span_id = parent.span_id.to_bytes(8, "big") if parent.is_valid else b""
        whole.start_time_unix_nano, whole.end_time_unix_nano = marks[0], gone or marks[-1]
        for attribute, value in zip(whole.attributes, ended.attributes, strict=True):
            _set(attribute.value, value)
        del whole.events[:]
        if gone:
            whole.events.add(name="client gone", time_unix_nano=gone)
        spans.append(whole)  # a copy
        trace_id, parent_id = whole.trace_id, whole.span_id
        for span, begin, end in zip(self._stretches, marks, marks[1:], strict=False):
            if end > begin:
                span.trace_id, span.parent_span_id = trace_id, parent_id
                span.span_id = new_id.generate_span_id().to_bytes(8, "big")
                span.start_time_unix_nano, span.end_time_unix_nano = begin, end
                spans.append(span)


def _set(any_value: Any, value: str | int) -> None:
    if isinstance(value, int):
        any_value.int_value = value
    else:
        any_value.string_value = value
