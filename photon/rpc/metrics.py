"""Prometheus: what a server says of itself by Status, served as metrics.

A table a room says which of its figures become which family, `photon_<room>_<thing>_<unit>`; a figure that
the status lacks (a cache process has no logs) is left out. Labels are processes, fates, shards, tiers,
joiners: never an id.
"""

import contextlib
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from photon.core.addresses import parts
from photon.core.errors import AddressInUseError, PhotonError
from photon.rpc.network import LOOPBACK, Network, Tls, reason_of
from photon.rpc.servers import Complaints

CONNECTIONS_MAX: Final = 8
CONNECTION_S_MAX: Final = 10.0
"""From accepting to the last byte of the answer."""
_LOOK_EVERY_S: Final = 0.5

Answer = Callable[[str], tuple[str, bytes]]
"""The request's Accept header -> content type and body of the answer. May raise PhotonError."""


class ScrapeServer(socketserver.ThreadingTCPServer):
    """Answers GET with what `answer` gives. `start` serves until the process ends, or `stop`.

    No caller can make it large: few connections, each with a thread and for a short while. The oldest goes
    when one too many comes. (prometheus_client's own server shakes hands in the thread that accepts, so one
    silent connection stops all scrapes: docs/decisions/001-dependencies.md.)
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, answer: Answer, tls: Tls | None = None) -> None:
        """AddressInUseError; SettingsError for TLS files that can't be used."""
        self.answer = answer
        self._context = None if tls is None else tls.server_context()
        self._complaints = Complaints(logging.getLogger("photon.metrics"))
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # since when, the oldest first
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Scrape)
        except OSError as error:
            raise AddressInUseError(
                f"cannot serve metrics on {host}:{port}: the address is taken or not of this machine; "
                "choose another one"
            ) from error

    def start(self) -> None:
        threading.Thread(
            target=self.serve_forever, args=(_LOOK_EVERY_S,), name="metrics", daemon=True
        ).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._end(time.monotonic() + 2 * CONNECTION_S_MAX)

    # What socketserver calls: in its own thread ...

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                self._forget(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Between connections and twice a second."""
        self._end(time.monotonic())

    # ... and in the thread of a connection.

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(CONNECTION_S_MAX)
        channel = request
        if self._context is not None:
            # A handshake takes as long as the caller likes; the plain socket stays, to be shut.
            channel = self._context.wrap_socket(request.dup(), server_side=True)
        with channel:
            _Scrape(channel, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        why = _why(sys.exc_info()[1])
        self._complaints.tell(f"closed the connection of {client_address[0]}: {why}")

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().close_request(request)

    def _end(self, now: float) -> None:
        """Shut those that take too long. Their threads see it, and end."""
        with self._lock:
            for request, since in list(self._open.items()):
                if now - since > CONNECTION_S_MAX:
                    self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        with contextlib.suppress(OSError):  # it has left
            request.shutdown(socket.SHUT_RDWR)


class _Scrape(BaseHTTPRequestHandler):
    """One request, one answer, and the end."""

    server: ScrapeServer
    server_version, sys_version = "photon", ""

    def do_GET(self) -> None:
        try:
            kind, body = self.server.answer(self.headers.get("Accept", ""))
        except PhotonError as error:
            self.send_error(503, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # scrapes are not news


def _why(error: BaseException | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS, which [tls] asks for, failed: {reason_of(error)}"
    return reason_of(error)


Status = Mapping[str, Any]

_US_A_SECOND: Final = 1e6


@dataclass(frozen=True, slots=True)
class Family:
    """One family of a room.

    `path`: of the figure in the status, keys joined by dots; `*` stands for each row of a list, or each key
    of a mapping. `label`: where the path has a `*`; its value is the row's `of`, or the mapping's key.
    """

    kind: Callable[..., Any]
    name: str
    path: str
    help: str
    label: str = ""
    of: str = ""


_counter: Final = partial(Family, CounterMetricFamily)
_gauge: Final = partial(Family, GaugeMetricFamily)
_histogram: Final = partial(Family, HistogramMetricFamily)
_TROUBLE: Final = _gauge("storage_failing", "storage_error", "1 while the disk can't be written.")

FAMILIES: Final[Mapping[str, Sequence[Family]]] = {
    "registry": (
        _gauge("shard_ids", "shards.*.ids", "Ids that the replica of the shard holds.", "shard", "shard"),
        _gauge("shard_leading", "shards.*.is_leader", "1 where it leads the shard.", "shard", "shard"),
        _gauge("shard_quorum", "shards.*.has_quorum", "1 where it knows a majority.", "shard", "shard"),
        _counter("shard_commands", "shards.*.applied_index", "Raft commands applied.", "shard", "shard"),
        _counter("shard_commits", "shards.*.commits", "Batches committed as the leader.", "shard", "shard"),
        _gauge("shard_file_bytes", "shards.*.file_bytes", "In files of old ids.", "shard", "shard"),
        _counter("shard_committed_ids", "shards.*.committed_ids", "Ids in them.", "shard", "shard"),
        _gauge(
            "shard_boundary_held_seconds",
            "shards.*.boundary_held_s",
            "By which the clock is past where the boundary would have moved.",
            "shard",
            "shard",
        ),
        _gauge("queue_ids", "queue", "Ids that wait to be committed."),
        _gauge("leases", "directory.leases", "Leases of joiners that are known."),
        _gauge(
            "hold_seconds",
            "directory.holding.*",
            "By which a dispatcher's oldest open event keeps the boundary back.",
            "dispatcher",
        ),
        _gauge("fences", "directory.fences", "Incarnations of joiners that are fenced."),
        _gauge(
            "gone_joiner_events",
            "gone_joiners.*.events",
            "Held by a joiner that is gone.",
            "joiner",
            "address",
        ),
        _gauge("configuration_version", "version", "Of the sharding configuration."),
    ),
    "importer": (
        _counter("records", "sources.*.records", "Records copied since the start.", "source", "source"),
        _counter("bytes", "sources.*.bytes", "Of them.", "source", "source"),
        _gauge("behind_records", "sources.*.behind", "Known and not copied yet.", "source", "source"),
        _gauge("kept_bytes", "sources.*.kept_bytes", "Of the copies.", "source", "source"),
        _counter(
            "lost_records",
            "sources.*.lost",
            "Deleted there before they were copied, in all runs.",
            "source",
            "source",
        ),
        _gauge("failing", "sources.*.trouble", "1 while the source can't be read.", "source", "source"),
    ),
    "eventstore": (
        _counter("events", "primary_events", "Primary events read."),
        _counter("malformed_events", "malformed", "Lines of the primary logs that are no event."),
        _counter("lost_bytes", "lost_bytes", "Of primary logs that were gone before they were read."),
        _gauge("caught_up", "caught_up", "1 where every byte of the primary logs was read."),
        _counter("cache_hits", "cache.hits", "Lookups answered by the cache."),
        _counter("cache_misses", "cache.misses", "Lookups that the cache could not answer."),
        _gauge("cache_bytes", "cache.bytes", "Memory of the cached events."),
        _gauge("cache_events", "cache.events", "Events in the cache."),
        _counter("logs_hits", "logs.hits", "Lookups answered by reading the logs."),
        _counter("logs_misses", "logs.misses", "Lookups of events that are not in the logs."),
        _counter("logs_read_bytes", "logs.bytes_read", "Read from the logs to answer lookups."),
        _counter("read_on_hits", "read_on.hits", "Lookups answered by reading on behind the map."),
        _counter("read_on_bytes", "read_on.bytes_read", "Read so."),
        _histogram("lookup_seconds", "latency_us.*", "Time of a lookup, by who answered it.", "tier"),
        _counter("filled_events", "fill.sent", "Events sent to the caches of other processes."),
        _counter("fill_dropped_events", "fill.dropped", "Events not sent to them: only a miss more."),
        _gauge("fill_waiting_bytes", "fill.waiting_bytes", "Events that wait to be sent to them."),
        _gauge("awaited_events", "arrivals.awaited", "Primary events that lookups asked for in vain."),
        _counter("arrived_events", "arrivals.arrived", "Those of them that have arrived."),
        _gauge("serves", "serves", "1 where it has read all that there was, and is asked."),
        _gauge("peer_there", "peers.*.there", "1 while this one of the others answers.", "peer", "peer"),
        _counter("followed_events", "peers.*.events", "Primary events that it has told of.", "peer", "peer"),
        _gauge("map_bytes", "map_bytes", "Size of the log file map."),
        _gauge("map_entries", "map_entries", "Entries of the log file map."),
        _counter("map_swept_entries", "map_swept", "Entries of deleted logs that were removed."),
        _TROUBLE,
    ),
    "joiner": (
        _counter("joined_events", "joined", "Joined lines written by this process."),
        _gauge("in_flight_requests", "in_flight", "Requests being answered."),
        _gauge("in_flight_commits", "commits_in_flight", "Batches on their way to the registry."),
        _gauge("unresolved_batches", "unresolved", "Intents without an end."),
        _counter("output_files", "output.listed", "Complete files of joined lines."),
        _gauge("output_waiting_files", "output.waiting", "Files closed and not listed as complete yet."),
        _gauge("output_failing", "output.trouble", "1 while files can't be completed."),
        _counter("published_events", "sinks.*.published", "Published since the start.", "sink", "sink"),
        _gauge("publishing_behind", "sinks.*.behind", "1 while the sink has not all.", "sink", "sink"),
        _gauge("publishing_failing", "sinks.*.trouble", "1 while the sink takes nothing.", "sink", "sink"),
        _gauge("unwritten_events", "account.unwritten", "Registered by it, and in no output."),
        _gauge("gone_events", "account.gone", "Registered, in files that are gone or cut short."),
        _gauge("unknown_events", "account.unknown", "Registered before its directory was lost."),
        _gauge("account_failing", "account.trouble", "1 where what it wrote could not be compared."),
        _gauge("lease_left_seconds", "lease.seconds_left", "Until the lease runs out."),
        _gauge("lease_failing", "lease.trouble", "1 where the last try to renew the lease failed."),
        _TROUBLE,
    ),
    "dispatcher": (
        _counter("events", "foreign_events", "Foreign events read."),
        _counter("fated_events", "fates.*", "Events by their fate.", "fate"),
        _gauge("pending_events", "pending", "Events without a fate yet."),
        _gauge("waiting_bytes", "waiting_bytes", "Of the ledger, by events that wait for their retry."),
        _counter("woken_events", "woken", "Events tried again because their primary events had arrived."),
        _counter("wasted_joins", "wasted_joins", "Joins of events that another had registered first."),
        _counter("lost_bytes", "lost_bytes", "Of foreign logs that were gone before they were read."),
        _counter("differing_duplicates", "differing.*", "Duplicates that are no plain repetitions.", "kind"),
        _gauge("backlog_bytes", "backlog.bytes", "Of the foreign logs, not read yet."),
        _gauge("backlog_events", "backlog.events", "The same in events, by the mean line so far."),
        _gauge("backlog_seconds", "backlog.seconds", "Age of the newest event read, while more is unread."),
        _gauge("in_flight_batches", "in_flight", "Requests to joiners under way."),
        _gauge("requests_max", "requests_max", "So many it may have under way now."),
        _gauge("paused", "paused", "1 while reading waits for events that wait."),
        _gauge("worker_files", "worker.files", "Foreign logs that this worker reads."),
        _gauge("drained", "drained", "1 where nothing is left to be done."),
        _histogram("latency_seconds", "latency_us", "From a line read to its joined line written."),
        _histogram(
            "event_latency_seconds", "event_latency_us", "From an event's time to its joined line written."
        ),
        _TROUBLE,
    ),
}


def serve_metrics(
    address: str, room: str, process: str, status: Callable[[], Status], network: Network = LOOPBACK
) -> ScrapeServer:
    """Answer scrapes at `/metrics` of the advertised address until the process ends; where there is TLS, of
    those that show a certificate of its CA. AddressInUseError, SettingsError, UsageError.
    """
    registry = CollectorRegistry()
    registry.register(_StatusCollector(room, process, status))
    if network.tls is not None:
        text = "Unix time at which the process's certificate expires."
        expires = Gauge("photon_certificate_expires_seconds", text, ["process"], registry=registry)
        expires.labels(process).set(network.tls.expires_s)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)

    def answer(accept: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accept)
        return kind, encode(registry)

    host, port = parts(network.bound(address))
    server = ScrapeServer(host, int(port), answer, network.tls)
    server.start()
    return server


def collect(room: str, process: str, status: Status) -> Iterator[Metric]:
    """The families of a room, from one status."""
    for family in FAMILIES[room]:
        name = f"photon_{room}_{family.name}"
        labels = ["process", *([family.label] if family.label else [])]
        metric = family.kind(name, family.help, labels=labels)
        for label, value in _values(family, status):
            _add(metric, [process, *label], value)
        if metric.samples:
            yield metric


class _StatusCollector:
    def __init__(self, room: str, process: str, status: Callable[[], Status]) -> None:
        self._room, self._process, self._status = room, process, status

    def collect(self) -> Iterable[Metric]:
        return collect(self._room, self._process, self._status())


def _values(family: Family, status: Status) -> Iterator[tuple[list[str], Any]]:
    """Label values and figure of each sample."""
    head, star, tail = family.path.partition("*")
    found = _at(status, head.rstrip("."))
    if not star:
        if found is not _MISSING:
            yield [], found
    elif isinstance(found, Mapping | Sequence):
        rows = found.items() if isinstance(found, Mapping) else ((row[family.of], row) for row in found)
        for label, row in rows:
            if (figure := _at(row, tail.lstrip("."))) is not _MISSING:
                yield [str(label)], figure


_MISSING: Final = object()


def _at(value: Any, path: str) -> Any:
    for key in path.split(".") if path else ():
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _add(metric: Any, labels: list[str], value: Any) -> None:
    if isinstance(metric, HistogramMetricFamily):
        buckets = _buckets(value)
        if "sum" in value:
            metric.add_metric(labels, buckets, value["sum"] / _US_A_SECOND)
        else:
            metric.add_metric(labels, buckets, None)
            named = dict(zip(metric._labelnames, labels, strict=True))
            metric.add_sample(f"{metric.name}_count", named, buckets[-1][1])
    elif isinstance(value, bool | int | float):
        metric.add_metric(labels, float(value))
    else:  # a text that says what is wrong, or None
        metric.add_metric(labels, float(bool(value)))


def _buckets(histogram: Status) -> list[tuple[str, float]]:
    """The status of a core.status.Histogram -> cumulative counts by upper edge in seconds."""
    edges = [repr(edge / _US_A_SECOND) for edge in histogram["edges"]] + ["+Inf"]
    counts = list(histogram["counts"])
    counts += [0] * (len(edges) - len(counts))
    seen = 0
    buckets = []
    for edge, count in zip(edges, counts, strict=True):
        seen += count
        buckets.append((edge, float(seen)))
    return buckets
