"""Joins as spans, sent to a real gRPC server that speaks OTLP."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from photon.connect.traces import HEADERS, TraceSink, context_of
from photon.connect.uris import parse_uri
from photon.core.errors import StorageError, UnavailableError, UsageError
from photon.logs.writer import LogPosition
from tests.certificates import Authority
from tests.system import photon

START = LogPosition(0, 0)
CLICK, QUERY = "0af7651916cd43dd8448eb211c80319c", "11f7651916cd43dd8448eb211c80319d"
SPANS = {CLICK: "b7ad6b7169203331", QUERY: "c7ad6b7169203332"}


def traceparent(trace, flags="01"):
    return f"00-{trace}-{SPANS[trace]}-{flags}"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets; fails as often as it is told to, before or after it has it."""

    def __init__(self, credentials=None):
        self.requests, self.metadata, self.failures, self.refused, self.reason = [], [], [], 0, ""
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        add = self._server.add_insecure_port if credentials is None else self._server.add_secure_port
        port = add("localhost:0", *([credentials] if credentials else []))
        self.address = f"localhost:{port}"
        self._server.start()

    def Export(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        self.requests.append(request)
        if self.failures:
            context.abort(self.failures.pop(0), "told to")
        answer = trace_service_pb2.ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.refused
        answer.partial_success.error_message = self.reason
        return answer

    def spans(self):
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def close(self):
        self._server.stop(None)


@pytest.fixture
def collector():
    one = Collector()
    yield one
    one.close()


@pytest.fixture
def sink(collector, tmp_path):
    def make(options="", writer="joiner-east.1", place=tmp_path / "places"):
        uri = parse_uri(f"otlp://{collector.address}?tls=no&place={place}{options}")
        return TraceSink(uri, writer, now=lambda: 2_000.0)

    return make


def lines(*events):
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def joined(event_id, foreign=None, primary=None, ts_us=1_500_000_000, **more):
    return {
        "id": event_id,
        "ts_us": ts_us,
        "traceparent": foreign,
        "primary": {"traceparent": primary},
        **more,
    }


def test_a_join_is_a_span_of_the_foreign_events_trace_linked_to_both(collector, sink):
    one = sink()
    assert one.open() is None
    both = joined("c1", traceparent(CLICK), traceparent(QUERY))
    one.write(lines(both, joined("c2", None, traceparent(QUERY)), joined("c3")), START, LogPosition(0, 9))
    first, second = collector.spans()
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (CLICK, SPANS[CLICK])
    links = [(link.trace_id.hex(), link.span_id.hex()) for link in first.links]
    assert links == [(CLICK, SPANS[CLICK]), (QUERY, SPANS[QUERY])]
    assert (second.trace_id.hex(), len(second.links)) == (QUERY, 1)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1_500 * 10**9, 2_000 * 10**9)
    assert [(one.key, one.value.string_value) for one in first.attributes] == [("photon.event_id", "c1")]
    assert len(first.span_id) == 8 and first.span_id != second.span_id
    (of_resource,) = collector.requests[0].resource_spans
    named = {one.key: one.value.string_value for one in of_resource.resource.attributes}
    assert named == {"service.name": "photon", "service.instance.id": "joiner-east.1"}


def test_what_is_no_traceparent_or_not_sampled_makes_no_span_and_no_request(collector, sink):
    one = sink()
    one.open()
    strange = [7, "", "x", f"ff-{CLICK}-{SPANS[CLICK]}-01", f"00-{'0' * 32}-{SPANS[CLICK]}-01", {"a": 1}]
    strange += [f"00-{CLICK}-{'0' * 16}-01", traceparent(CLICK).upper(), traceparent(CLICK) + "x"]
    events = [joined("c", value, value) for value in strange]
    events += [joined("n", traceparent(CLICK, "00")), {"id": "p", "primary": "text", "traceparent": []}]
    one.write(lines(*events), START, LogPosition(0, 9))
    assert collector.requests == [] and sink().open() == LogPosition(0, 9)
    one.write(lines(joined("c", traceparent(CLICK, "00"), traceparent(QUERY))), START, LogPosition(0, 9))
    assert len(collector.spans()) == 1
    assert context_of(f"01-{CLICK}-{SPANS[CLICK]}-01-more").trace_id.hex() == CLICK


@pytest.mark.parametrize(
    ("options", "value", "start_s"),
    [
        ("&time=at&time_unit=rfc3339", "1970-01-01T00:20:00Z", 1_200),
        ("&time=at&time_unit=s", 1_200, 1_200),
        ("&time=at&time_unit=ms", 1_200_500.0, 1_200.5),
        ("&time=at", None, 2_000),
        ("&time=at", "soon", 2_000),
        ("&time=at&time_unit=s", 3_000, 2_000),
        ("&time=at&time_unit=s", -5, 0),
    ],
)
def test_a_span_begins_at_the_events_time_where_it_tells_one(collector, sink, options, value, start_s):
    one = sink(options)
    one.open()
    one.write(lines(joined("c", traceparent(CLICK), at=value)), START, LogPosition(0, 9))
    assert collector.spans()[0].start_time_unix_nano == start_s * 10**9


def test_a_batch_whose_answer_was_lost_comes_again_with_the_same_ids(collector, sink):
    one = sink()
    one.open()
    batch = lines(*(joined(f"c{n}", traceparent(CLICK)) for n in range(50)))
    collector.failures = [grpc.StatusCode.UNAVAILABLE]
    with pytest.raises(UnavailableError, match="unavailable: told to"):
        one.write(batch, START, LogPosition(0, 99))
    assert one.open() is None
    one.write(batch, START, LogPosition(0, 99))
    spans = collector.spans()
    assert [span.span_id for span in spans[:50]] == [span.span_id for span in spans[50:]]
    assert len({span.span_id for span in spans}) == 50
    assert sink().open() == LogPosition(0, 99) and sink(writer="joiner-east.2").open() is None


def test_two_collectors_in_one_directory_have_a_place_each(collector, sink, tmp_path):
    one = sink()
    one.open()
    one.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
    other = TraceSink(parse_uri(f"otlp://other:4317?place={tmp_path / 'places'}"), "joiner-east.1")
    assert (one.open(), other.open()) == (LogPosition(0, 9), None)


def test_what_will_never_work_is_told_and_spans_that_are_refused_are_not_sent_again(collector, sink):
    one = sink()
    one.open()
    collector.failures = [grpc.StatusCode.UNAUTHENTICATED]
    with pytest.raises(UsageError, match="unauthenticated: told to"):
        one.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
    collector.refused = 1
    for collector.reason in ("trace 4bf9 is 7 s old", "trace bf01 is 30 s old", ""):
        one.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
    assert one.refused == {"trace N is N s old": 2, "no reason given": 1}
    assert sink().open() == LogPosition(0, 9)


def test_headers_come_from_the_environment(collector, sink, monkeypatch):
    monkeypatch.setenv(HEADERS, "Authorization=Bearer%20x, tenant=a")
    one = sink()
    one.open()
    one.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
    assert {"authorization": "Bearer x", "tenant": "a"}.items() <= collector.metadata[0].items()
    monkeypatch.setenv(HEADERS, "secret")
    with pytest.raises(UsageError, match="name=value"):
        sink()


def test_it_asks_for_tls_and_trusts_the_ca_that_is_named(tmp_path):
    authority = Authority(tmp_path / "ca")
    tls = authority.issue("localhost")
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    one = Collector(grpc.ssl_server_credentials([pair]))
    try:
        for ca, works in ((f"&ca={tls.ca}", True), ("", False)):
            made = TraceSink(parse_uri(f"otlp://{one.address}?place={tmp_path}{ca}"), "w")
            made.open()
            if works:
                made.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
            else:
                with pytest.raises(UnavailableError):
                    made.write(lines(joined("c", traceparent(CLICK))), START, LogPosition(0, 9))
        assert len(one.spans()) == 1
    finally:
        one.close()


def test_what_can_not_be_is_told_with_the_mend(tmp_path):
    place = f"place={tmp_path}"
    for text, told in (
        (f"otlp://h:1/x?{place}", "write otlp://HOST:PORT"),
        ("otlp://h:1", "place=DIRECTORY"),
        (f"otlp://h:1?{place}&foo=1", "unknown option 'foo'"),
        (f"otlp://h:1?{place}&tls=maybe", "tls is one of yes, no"),
        (f"otlp://h:1?{place}&time_unit=h", "time_unit is one of s, ms"),
        (f"otlp://h:1?{place}&foreign=.a", "empty part"),
    ):
        with pytest.raises(UsageError, match=told):
            TraceSink(parse_uri(text), "w")
    with pytest.raises(UsageError, match="cannot be read"):
        TraceSink(parse_uri(f"otlp://h:1?{place}&ca=/nope"), "w").open()
    (tmp_path / "w.h:1.json").write_text("{")
    with pytest.raises(StorageError, match="delete it to begin anew"):
        TraceSink(parse_uri(f"otlp://h:1?{place}"), "w").open()


@pytest.mark.cluster
def test_joins_of_a_run_are_spans_once(tmp_path, collector):
    """Also those of a second run of the same command."""
    trace = {name: f"{number + 1:032x}" for number, name in enumerate(["q", *(f"c{n}" for n in range(30))])}
    at = 1_700_000_000_000_000

    def event(event_id, **more):
        return {"id": event_id, "ts_us": at, "traceparent": f"00-{trace[event_id]}-{'1' * 16}-01", **more}

    (tmp_path / "q.jsonl").write_bytes(lines(event("q")))
    (tmp_path / "c.jsonl").write_bytes(lines(*(event(f"c{n}", primary_id="q") for n in range(20))))
    sink = f"otlp://{collector.address}?tls=no&place={tmp_path / 'places'}"
    command = ("join", "--primary", tmp_path / "q.jsonl", "--foreign", tmp_path / "c.jsonl")
    for count in (20, 30):
        ran = photon(*command, "--sink", sink, "--out", tmp_path / "out")
        assert ran.returncode == 0, ran.stderr
        assert sorted(span.trace_id.hex() for span in collector.spans()) == sorted(
            trace[f"c{n}"] for n in range(count)
        )
        assert {span.links[1].trace_id.hex() for span in collector.spans()} == {trace["q"]}
        with (tmp_path / "c.jsonl").open("ab") as file:
            file.write(lines(*(event(f"c{n}", primary_id="q") for n in range(20, 30))))
