"""Shared: a finished request as OpenTelemetry spans, one for it and one for each stretch of its way.

Spans are made after the fact, from the timeline, so a request on its way costs nothing. They are made by a thread, of
all requests that have ended since it last did so, straight in the form in which they are sent: the SDK's own would take
more than a short request costs the frontend otherwise, and so would a message of the library's for each stretch.
Sampling, resource and all ids are the SDK's, with its environment variables.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from srt.observe.timeline import NAMES, Timeline, in_order

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
# Numbers and kinds of fields as protobuf writes them, with the length of an id; then all that two spans of a stretch
# do not have in common.
_RESOURCE_SPANS, _SCOPE_SPANS, _SPANS = b"\x0a", b"\x12", b"\x12"
_TRACE_ID, _SPAN_ID, _PARENT_SPAN_ID, _START, _END = b"\x0a\x10", b"\x12\x08", b"\x22\x08", b"\x39", b"\x41"
_STRETCH = Struct("<2s16s 2sQ 2s8s cQ cQ")
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
        from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
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
        resource = ResourceSpans()
        for name, value in self._provider.resource.attributes.items():
            resource.resource.attributes.add(key=name).value.string_value = str(value)
        self._resource = resource.SerializeToString()
        self._scope = ScopeSpans(scope={"name": SERVICE}).SerializeToString()
        # It is filled in again and again, for one request after the other: new ones would take three times as long.
        attributes = [{"key": name} for name in ATTRIBUTES]
        self._whole = Span(name="request", kind=Span.SPAN_KIND_SERVER, attributes=attributes)
        self._values = [attribute.value for attribute in self._whole.attributes]
        named = [Span(name=name, kind=Span.SPAN_KIND_INTERNAL).SerializeToString() for name in NAMES]
        self._stretches = [_SPANS + bytes([len(part) + _STRETCH.size]) + part for part in named]
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
        zero = time.time_ns() - time.monotonic_ns()  # when CLOCK_MONOTONIC was 0, in ns since 1970
        marks = in_order(np.array([one.timeline.raw() for one in ended]))
        times = (zero + np.rint(marks * 1e9).astype(np.int64)).tolist()
        spans = b"".join([self._spans(one, at, zero) for one, at in zip(ended, times, strict=True)])
        if not spans:
            return
        message = _field(_RESOURCE_SPANS, self._resource + _field(_SCOPE_SPANS, self._scope + spans))
        try:
            self._session.post(self._endpoint, message, timeout=TIMEOUT).raise_for_status()
        except self._failure as error:
            log.warning("traces of %d requests are lost: %s", len(ended), error)

    def _spans(self, ended: Ended, times: Sequence[int], zero: int) -> bytes:
        """Those of one request as fields of a `ScopeSpans`, if the sampler wants them."""
        given = ended.traceparent
        context = self._propagator.extract({"traceparent": given}) if given else None
        parent = self._span_in(context).get_span_context()
        new_id = self._provider.id_generator
        trace = parent.trace_id if parent.is_valid else new_id.generate_trace_id()
        if self._provider.sampler.should_sample(context, trace, "request").decision is not self._sampled:
            return b""
        whole = self._whole
        gone = zero + round(ended.timeline.gone * 1e9) if ended.timeline.gone else 0
        trace_id = whole.trace_id = trace.to_bytes(16, "big")
        span_id = whole.span_id = new_id.generate_span_id().to_bytes(8, "big")
        whole.parent_span_id = parent.span_id.to_bytes(8, "big") if parent.is_valid else b""
        whole.start_time_unix_nano, whole.end_time_unix_nano = times[0], gone or times[-1]
        for any_value, value in zip(self._values, ended.attributes, strict=True):
            if isinstance(value, int):
                any_value.int_value = value
            else:
                any_value.string_value = value
        del whole.events[:]
        if gone:
            whole.events.add(name="client gone", time_unix_nano=gone)
        spans = [_field(_SPANS, whole.SerializeToString())]
        for stretch, begin, end in zip(self._stretches, times, times[1:], strict=False):
            if end > begin:
                spans += stretch, _STRETCH.pack(
                    _TRACE_ID, trace_id, _SPAN_ID, new_id.generate_span_id(), _PARENT_SPAN_ID, span_id,
                    _START, begin, _END, end,
                )  # fmt: skip
        return b"".join(spans)


def _field(field: bytes, value: bytes) -> bytes:
    """Its length stands before the value: seven bits in a byte, the lowest first, and the eighth where more follow."""
    length, head = len(value), bytearray(field)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + value
