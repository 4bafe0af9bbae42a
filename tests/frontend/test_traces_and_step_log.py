"""A line in the log every few seconds, and traces as a collector gets them."""

import json
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from frontend_harness import Server

from srt.board import GAUGES, Board, RankRecord
from srt.frontend.metrics import Metrics
from srt.frontend.step_log import SECONDS, StepLog
from srt.observe.timeline import MARKS, NAMES, Timeline
from srt.observe.tracing import Ended, Tracer

BODY = {"text": "a secret", "rid": "mine", "sampling_params": {"max_new_tokens": 3, "temperature": 0.25}}


def test_a_line_every_few_seconds_in_which_something_was_served(caplog, tmp_path):
    board = Board.create(str(tmp_path / "board"), 1)
    record, metrics = RankRecord(board, 0), Metrics(["lockstep"], "m", 1)
    log = StepLog([board], metrics)
    with caplog.at_level(logging.INFO):
        log.tick(100.0)
        assert not caplog.records
        record.gauges(**{**dict.fromkeys(GAUGES, 0), "running": 2, "waiting": 1, "pool_total": 200, "pool_free": 150})
        metrics.tokens(0, 60, {0.1: 1})
        log.tick(100.0 + SECONDS / 2)
        assert not caplog.records
        log.tick(101.0 + SECONDS)  # it may come late
        record.gauges(**dict.fromkeys(GAUGES, 0))
        log.tick(101.0 + 2 * SECONDS)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "running 2, waiting 1, 50 of 200 tokens in use (25.0 %), hit rate 0.00, 10.0 tokens/s"
    board.close()


class Collector(HTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Taker)
        self.spans = []


class Taker(BaseHTTPRequestHandler):
    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            raw = gzip.decompress(raw)
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_collector_gets_a_span_for_the_request_and_one_for_each_stretch(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    with Server(tmp_path, otlp_traces_endpoint=endpoint) as server:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        _, _, raw = server.request("POST", "/generate", BODY, headers=headers)
    collector.shutdown()
    collector.server_close()
    stretches = json.loads(raw)["meta_info"]["timeline"]
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() == {"request"} | {name for name, seconds in stretches.items() if seconds}
    whole = spans.pop("request")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (trace, parent)
    assert {attribute.key for attribute in whole.attributes} >= {"gen_ai.usage.input_tokens", "gen_ai.response.id"}
    for name, span in spans.items():
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(stretches[name], abs=1e-5)


def test_who_says_that_it_is_not_sampled_is_not():
    pytest.importorskip("opentelemetry.sdk")
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    tracer = Tracer(f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
    for number, flags in ((1, "00"), (2, "01"), (3, "00"), (4, "01")):
        timeline = Timeline(float(number))
        timeline.parsed, timeline.written = number + number / 8, number + 0.75
        tracer.ended(Ended(timeline, f"00-{number:032x}-{7:016x}-{flags}", ("", "stop", 1, number, 0)))
    tracer.close(60)
    collector.shutdown()
    collector.server_close()
    lengths = {}
    wholes = [span for span in collector.spans if span.name == "request"]
    generated = [
        one.value.int_value for span in wholes for one in span.attributes if one.key == "gen_ai.usage.output_tokens"
    ]
    assert generated == [2, 4]
    for span in collector.spans:
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        lengths.setdefault(int(span.trace_id.hex(), 16), {})[span.name] = seconds
    assert lengths == {
        number: pytest.approx({"request": 0.75, "parse": number / 8, "write": 0.75 - number / 8}) for number in (2, 4)
    }


def test_many_requests_in_one_message_have_all_their_spans():
    pytest.importorskip("opentelemetry.sdk")
    from google.protobuf.unknown_fields import UnknownFieldSet
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    tracer = Tracer(f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
    timeline = Timeline(*(1.0 + at for at in range(len(MARKS))))
    for number in range(100):
        tracer.ended(Ended(timeline, "", (f"mine{number}", "length", 32, 256, 2**40)))
    tracer.close(60)
    collector.shutdown()
    collector.server_close()
    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 100 * (1 + len(NAMES))
    wholes = {span.trace_id: span for span in collector.spans if span.name == "request"}
    assert [span.attributes[0].value.string_value for span in wholes.values()] == [f"mine{n}" for n in range(100)]
    zero = collector.spans[0].start_time_unix_nano
    stretches: dict[bytes, list[Span]] = {trace_id: [] for trace_id in wholes}
    for span in collector.spans:
        assert not len(UnknownFieldSet(span))
        if span.name != "request":
            stretches[span.trace_id].append(span)
    for trace_id, spans in stretches.items():
        assert tuple(span.name for span in spans) == NAMES
        assert {(span.kind, span.parent_span_id) for span in spans} == {
            (Span.SPAN_KIND_INTERNAL, wholes[trace_id].span_id)
        }
        assert [(span.start_time_unix_nano - zero, span.end_time_unix_nano - zero) for span in spans] == [
            (at * 10**9, (at + 1) * 10**9) for at in range(len(NAMES))
        ]


def test_who_leaves_has_a_span_up_to_then(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with Server(tmp_path, otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_address[1]}/v1/traces") as server:
        server.engine.hold_at = 1
        stream, _ = server.open_stream("/generate", BODY)
        stream.close()
        server.wait_for(lambda: not server.services.manager.live)
    collector.shutdown()
    collector.server_close()
    (whole,) = [span for span in collector.spans if span.name == "request"]
    (gone,) = whole.events
    assert gone.name == "client gone"
    assert gone.time_unix_nano == whole.end_time_unix_nano
    assert whole.end_time_unix_nano > max(span.end_time_unix_nano for span in collector.spans if span is not whole)


def test_nobody_waits_for_a_collector_that_is_not_there():
    pytest.importorskip("opentelemetry.sdk")
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as mute:
        tracer = Tracer(f"http://127.0.0.1:{mute.getsockname()[1]}/v1/traces")
        tracer.ended(Ended(Timeline(1.0), "", ("", "stop", 1, 1, 0)))
        tracer.close(0.01)
        left = set(threading.enumerate()) - threads
        assert left
        assert all(thread.daemon for thread in left)  # so that the process can end
