"""Shared: a finished request as OpenTelemetry spans, one for it and one for each stretch of its way.

Spans are made after the fact, from the timeline, so a request on its way costs nothing. They are made by a thread once
a second, straight in the form in which they are sent, and those of a stretch for all requests at once: the SDK's own
would take more than a short request costs the frontend otherwise. Sampling, resource and the ids of traces are the
SDK's, with its environment variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from srt.observe.timeline import NAMES, Timeline, in_order

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
    timeline: Timeline
    traceparent: str
    attributes: Mapping[str, str | int]


class Mould:
    """Casts spans of one name. They differ in fields of fixed length only, so all have the bytes of one that the
    library has written, but for these."""

    def __init__(self, name: str, scope: Any) -> None:
        """`scope` is an empty message of spans."""
        ids = {"trace_id": b"sixteen of trace", "span_id": b"the span", "parent_span_id": b"a parent"}
        times = {"start_time_unix_nano": b"begin at", "end_time_unix_nano": b"ends at "}
        numbers = {field: int.from_bytes(mark, "little") for field, mark in times.items()}
        span = scope.spans.add(name=name, **ids, **numbers)
        span.kind = span.SPAN_KIND_INTERNAL
        self._bytes = scope.SerializeToString()
        self._layout = np.dtype(
            {
                "names": [*ids, *times],
                "formats": ["V16", "V8", "V8", "<i8", "<i8"],
                "offsets": [self._bytes.index(mark) for mark in (*ids.values(), *times.values())],
                "itemsize": len(self._bytes),
            }
        )

    def cast(self, traces: np.ndarray, parents: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> bytes:
        """Those that last at all. A message can be merged with them, since such bytes are joined by concatenation."""
        lasting = ends > begins
        count = np.count_nonzero(lasting)
        spans = np.frombuffer(bytearray(self._bytes * count), self._layout)
        spans["trace_id"], spans["parent_span_id"] = traces[lasting], parents[lasting]
        spans["span_id"] = np.frombuffer(os.urandom(8 * count), "V8")
        spans["start_time_unix_nano"], spans["end_time_unix_nano"] = begins[lasting], ends[lasting]
        return spans.tobytes()


class Tracer:
    def __init__(self, endpoint: str) -> None:
        """`endpoint` takes OTLP over HTTP, like http://collector:4318/v1/traces."""
        import requests
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
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
        self._moulds = [Mould(name, ScopeSpans()) for name in NAMES]
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
        self._ended.append(Ended(timeline, traceparent, attributes))

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
            _add_attribute(resource.resource.attributes, name, str(value))
        scope = resource.scope_spans.add()
        scope.scope.name = SERVICE
        self._add_all(scope, ended)
        if not scope.spans:
            return
        try:
            self._session.post(self._endpoint, message.SerializeToString(), timeout=TIMEOUT).raise_for_status()
        except self._failure as error:
            log.warning("traces of %d requests are lost: %s", len(ended), error)

    def _add_all(self, scope: Any, ended: Sequence[Ended]) -> None:
        zero = time.time_ns() - time.monotonic_ns()  # when CLOCK_MONOTONIC was 0, in ns since 1970
        marks = in_order(np.array([one.timeline.raw for one in ended]))
        marks = zero + (marks * 1e9).round().astype(np.int64)
        is_added = [self._add(scope.spans, *one, zero) for one in zip(ended, marks[:, 0], marks[:, -1], strict=True)]
        if not scope.spans:
            return
        marks = marks[is_added].T
        traces = np.frombuffer(b"".join([whole.trace_id for whole in scope.spans]), "V16")
        wholes = np.frombuffer(b"".join([whole.span_id for whole in scope.spans]), "V8")
        for mould, begins, ends in zip(self._moulds, marks, marks[1:], strict=False):
            scope.MergeFromString(mould.cast(traces, wholes, begins, ends))

    def _add(self, spans: Any, ended: Ended, begin: int, end: int, zero: int) -> bool:
        """The span of the whole request, if the sampler wants it. Times in ns."""
        given = ended.traceparent
        context = self._propagator.extract({"traceparent": given}) if given else None
        parent = self._span_in(context).get_span_context()
        new_id = self._provider.id_generator
        trace = parent.trace_id if parent.is_valid else new_id.generate_trace_id()
        if self._provider.sampler.should_sample(context, trace, "request").decision is not self._sampled:
            return False
        gone = zero + round(ended.timeline.gone * 1e9) if ended.timeline.gone else 0
        whole = spans.add(
            trace_id=trace.to_bytes(16, "big"),
            span_id=new_id.generate_span_id().to_bytes(8, "big"),
            parent_span_id=parent.span_id.to_bytes(8, "big") if parent.is_valid else b"",
            name="request",
            start_time_unix_nano=begin,
            end_time_unix_nano=gone or end,
        )
        whole.kind = whole.SPAN_KIND_SERVER
        for name, value in ended.attributes.items():
            _add_attribute(whole.attributes, name, value)
        if gone:
            whole.events.add(name="client gone", time_unix_nano=gone)
        return True


def _add_attribute(attributes: Any, name: str, value: str | int) -> None:
    added = attributes.add(key=name)
    if isinstance(value, int):
        added.value.int_value = value
    else:
        added.value.string_value = value
