"""OpenTelemetry as a sink: a span for each join whose events carry a `traceparent` (W3C Trace Context).

The span is in the foreign event's trace, or in the primary's where only that has one, and links to both. Its
id follows from the event's, so that a batch that is sent again makes no second span. A collector can't tell
what it has; so the place is kept in a file of ours, behind what was acknowledged.
"""

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from photon.connect.keys import Columns, fields_of
from photon.connect.ports import Guarantee
from photon.connect.uris import Uri
from photon.core.disk import make_directory, read_json, storage_errors, write_json
from photon.core.errors import UnavailableError, UsageError
from photon.core.settings import TIME_UNITS
from photon.logs.formats import time_type, to_us
from photon.logs.writer import LogPosition

EXPORT_S: Final = 10.0
HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
"""Environment variable of the OpenTelemetry specification: `name=value,...`, for what is secret."""
_OPTIONS: Final = {
    "place": "",
    "foreign": "traceparent",
    "primary": "primary.traceparent",
    "id": "id",
    "time": "ts_us",
    "time_unit": "us",
    "tls": "yes",
    "ca": "",
    "service": "photon",
}
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SAMPLED: Final = 1
_NUMBERS: Final = re.compile(r"\b[0-9a-f]*\d[0-9a-f.]*")
"""In a reason: the others of its kind have others."""
_REASONS_MAX: Final = 16
_NEVER_WORKS: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)


class Context(NamedTuple):
    """Of one event."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


def context_of(value: Any) -> Context | None:
    """What a `traceparent` says; None for anything that is none."""
    found = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    trace_id, span_id, flags = map(bytes.fromhex, found.groups())
    return Context(trace_id, span_id, bool(flags[0] & _SAMPLED))


class TraceSink:
    """photon.connect.ports.Sink of `otlp://HOST:PORT`.

    Options: `place`, the directory where it keeps how far it is; `foreign` and `primary`, the fields with the
    traceparents, and `id`, `time`, `time_unit`; `tls=no`; `ca`; `service`.
    """

    guarantee = Guarantee.KEYED
    batch_bytes = 1 << 20
    linger_s = 1.0

    def __init__(self, uri: Uri, writer: str, now: Callable[[], float] = time.time) -> None:
        options = uri.take(_OPTIONS)
        if not uri.place or uri.path:
            raise UsageError(f"{uri.shown}: write otlp://HOST:PORT?place=DIRECTORY")
        if not options["place"]:
            raise UsageError(f"{uri.shown}: name a directory where it keeps how far it is: place=DIRECTORY")
        for name, known in (("tls", ("yes", "no")), ("time_unit", TIME_UNITS)):
            if options[name] not in known:
                raise UsageError(f"{uri.shown}: {name} is one of {', '.join(known)}, not '{options[name]}'")
        self._uri, self._now, self._unit = uri, now, options["time_unit"]
        self._fields = fields_of({name: options[name] for name in ("foreign", "primary", "id", "time")})
        self._place = Path(options["place"], f"{writer}.{uri.place}.json")
        self._secure, self._ca = options["tls"] == "yes", options["ca"]
        attributes = {"service.name": options["service"], "service.instance.id": writer}
        self._resource = Resource(attributes=_attributes(attributes))
        self._headers = _headers(os.environ.get(HEADERS, ""))
        self._channel: Any = None
        self.refused: Counter[str] = Counter()

    def open(self) -> LogPosition | None:
        self.close()
        self._channel = self._connected()
        with storage_errors(self._place):
            make_directory(self._place.parent)
        return read_json(self._place, LogPosition, "no place of Photon's ({}); delete it to begin anew")

    def _connected(self) -> Any:
        if not self._secure:
            return grpc.insecure_channel(self._uri.place)
        try:
            roots = Path(self._ca).read_bytes() if self._ca else None
        except OSError as error:
            raise UsageError(f"{self._uri.shown}: its ca {self._ca} cannot be read ({error})") from error
        return grpc.secure_channel(self._uri.place, grpc.ssl_channel_credentials(roots))

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        spans = list(self._spans(self._fields(lines)))
        if spans:
            scope = ScopeSpans(scope=InstrumentationScope(name="photon"), spans=spans)
            request = ExportTraceServiceRequest(
                resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[scope])]
            )
            try:
                make: Any = TraceServiceStub
                answer = make(self._channel).Export(request, timeout=EXPORT_S, metadata=self._headers)
            except grpc.RpcError as error:
                kind = UsageError if error.code() in _NEVER_WORKS else UnavailableError
                raise kind(f"{self._uri.shown}: {error.code().name.lower()}: {error.details()}") from error
            told = answer.partial_success
            if told.rejected_spans:  # not to be sent again, says the protocol
                reason = _NUMBERS.sub("N", told.error_message) or "no reason given"
                known = reason in self.refused or len(self.refused) < _REASONS_MAX
                self.refused[reason if known else "other reasons"] += told.rejected_spans
        write_json(self._place, end)

    def _spans(self, columns: Columns) -> Iterator[Span]:
        now_ns = round(self._now() * 1e9)
        rows = zip(columns["foreign"], columns["primary"], columns["id"], columns["time"], strict=True)
        for foreign, primary, event_id, own in rows:
            contexts = [one for one in (context_of(foreign), context_of(primary)) if one is not None]
            if not any(one.is_sampled for one in contexts):
                continue
            parent, name = contexts[0], event_id if isinstance(event_id, str) else repr(event_id)
            yield Span(
                trace_id=parent.trace_id,
                span_id=hashlib.blake2b(parent.span_id + name.encode(), digest_size=8).digest(),
                parent_span_id=parent.span_id,
                name="photon join",
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=min(now_ns, self._own_ns(own, now_ns)),
                end_time_unix_nano=now_ns,
                attributes=_attributes({"photon.event_id": name}),
                links=[Span.Link(trace_id=one.trace_id, span_id=one.span_id) for one in contexts],
            )

    def _own_ns(self, value: Any, otherwise: int) -> int:
        """The event's time."""
        try:
            (own_us,) = to_us([msgspec.convert(value, time_type(self._unit))], self._unit)
        except (TypeError, ValueError, OverflowError):
            return otherwise
        return max(0, int(own_us) * 1000)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _attributes(named: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in named.items()]


def _headers(text: str) -> list[tuple[str, str]]:
    """UsageError."""
    named = [one.partition("=") for one in text.split(",") if one.strip()]
    if not all(equals for _, equals, _ in named):
        raise UsageError(f"{HEADERS}: write name=value,name=value")
    return [(unquote(name.strip()).lower(), unquote(value.strip())) for name, _, value in named]
