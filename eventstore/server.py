"""The processes of the EventStore: home, with reader, cache, log file map and logs store (paper 3.4), and a
cache process, which holds a share of the CacheEventStore and is announced to home (paper 3.4.1).

Calls have columns in and columns out (photon/rpc/eventstore.proto), and errors as status codes.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from eventstore.arrivals import Arrivals
from eventstore.cache import ANNOUNCE_EVERY_S, SILENT_S_MAX, CacheEventStore, CacheShare, Filling, Members
from eventstore.log_file_map import LogFileMap
from eventstore.lookup import EventLookup, LogsEventStore, bounded
from eventstore.reader import Reader, ReadOn
from eventstore.segments import LOADING_LETTERS, identity_of
from photon.core.addresses import mistake
from photon.core.clock import Background, Clock
from photon.core.columns import join_lines, split_ids, split_lines
from photon.core.disk import storage_errors
from photon.core.errors import OverloadedError, PhotonError, UnavailableError
from photon.core.fates import Found
from photon.core.ids import ID_BYTES
from photon.core.settings import MIB, Settings
from photon.core.status import Histogram, Notices
from photon.logs.follow import LogFollower
from photon.logs.formats import json_lines
from photon.logs.writer import RotatingLog
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network, failure_of
from photon.rpc.servers import Server

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["EventStore"].full_name
_WORKERS: Final = 8
_IN_FLIGHT_MAX: Final = 256
_ARRIVALS_WAIT_S: Final = 15.0
_LISTENERS_A_DISPATCHER: Final = 2
"""One listens; of one that was killed, a call may not have ended yet."""
_DEAD_LETTER_FILE_BYTES_MAX: Final = 256 * MIB


class EventStoreServer(eventstore_pb2_grpc.EventStoreServicer):
    """Home. Serves EventStore on `listen`, reads the logs that match `patterns`, keeps a map in `directory`.

    Malformed lines go to `dead_letters`/primary-NNNNNN.jsonl. `drain`: the logs will grow no more.
    `on_fatal` gets, in the reader's thread, an error that only a restart or the user can mend.
    """

    def __init__(
        self,
        settings: Settings,
        listen: str,
        directory: Path,
        patterns: Sequence[str],
        dead_letters: Path,
        clock: Clock,
        drain: bool = False,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        network: Network = LOOPBACK,
    ) -> None:
        """CorruptStateError, LockedError, SettingsError, StorageError, UsageError."""
        own = settings.eventstore
        self._virtual_nodes = own.virtual_nodes
        listeners = _LISTENERS_A_DISPATCHER * settings.dispatcher.workers
        self._arrivals = Arrivals(listeners)
        # Each that waits for arrivals has a thread; as many are left to lookups.
        workers = _WORKERS + listeners
        self._server = Server(listen, workers, in_flight_max=_IN_FLIGHT_MAX, network=network)
        self._map = LogFileMap(directory / "map", own, identity_of(settings))
        self._cache = CacheEventStore(own.cache_bytes)
        self._notices = Notices("eventstore")
        with storage_errors(dead_letters):
            (dead_letters / LOADING_LETTERS).unlink(missing_ok=True)  # of a load that was killed
        self._dead_letters = RotatingLog(dead_letters, "primary", _DEAD_LETTER_FILE_BYTES_MAX)
        self._members = Members(clock)
        self._filling = Filling(
            self._cache, self._members.membership, own.virtual_nodes, self._map.store, network
        )
        wake = threading.Event()
        follower = LogFollower(
            patterns,
            directory / "spool",
            settings.logs,
            clock,
            self._map.states(),
            drain,
            self._notices.tell,
            wake=wake.set,
            first=self._map.next_number,
        )
        self._reader = Reader(
            follower,
            self._map,
            self._put,
            json_lines(settings),
            self._dead_letters,
            settings.logs,
            clock,
            self._notices,
            on_fatal,
            wake,
            self._arrivals.read_to,
        )
        self._logs = LogsEventStore(self._map, lambda: json_lines(settings), self._notices.tell)
        self._read_on = ReadOn(self._reader, self._map, json_lines(settings), own.read_on_bytes_max, clock)
        self._lookup = EventLookup(
            self._cache,
            self._logs,
            self._reader,
            clock,
            self._filling.put_many,
            self._read_on,
            self._arrivals,
        )
        self._server.serve_while(lambda: self._reader.storage_error is None)
        self._server.add(eventstore_pb2_grpc.add_EventStoreServicer_to_server, self, SERVICE_NAME)

    @property
    def listen(self) -> str:
        """The address it serves on; after `start` with the port that was chosen for `:0`."""
        return self._server.listen

    def start(self) -> None:
        """Serve and read. AddressInUseError if the port is taken."""
        self._server.start()
        self._reader.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let lookups and the reader's transaction end. What is not on disk is read again next time."""
        self._arrivals.close()
        self._server.stop(grace_s)
        self._reader.stop()
        self._filling.close()
        self._dead_letters.close()
        self._map.close()

    def lookup(self, ids: bytes, missed: bool = False) -> tuple[bytes, list[bytes]]:
        """As the Lookup call: core.fates.Found column and lines."""
        return self._lookup.look_up(ids, missed)

    def status(self) -> dict[str, Any]:
        reader, cache, logs = self._reader, self._cache, self._logs
        return {
            "primary_events": self._map.counts.primary_events,
            "malformed": self._map.counts.malformed,
            "lost_bytes": self._map.counts.lost_bytes,
            "caught_up": reader.caught_up,
            "cache": cache.status(),
            "logs": {"hits": logs.hits, "misses": logs.misses, "bytes_read": logs.bytes_read},
            "read_on": {"hits": self._read_on.hits, "bytes_read": self._read_on.bytes_read},
            "latency_us": {
                "cache": self._lookup.cache_latency.status(),
                "logs": self._lookup.logs_latency.status(),
            },
            "arrivals": {"awaited": self._arrivals.awaited, "arrived": self._arrivals.count},
            "members": self._members.membership().caches,
            "fill": self._filling.status(),
            "map_bytes": self._map.disk_bytes,
            "map_entries": self._map.entries(),
            "map_swept": self._map.swept,
            "map_trouble": self._map.trouble,
            "notices": self._notices.lines(),
            "unended": reader.unended,
            "unreadable": reader.unreadable,
            "storage_error": reader.storage_error,
        }

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        _check_ids(request.ids, context)
        try:
            outcomes, lines = self.lookup(request.ids, request.missed)
        except PhotonError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        version = self._members.membership().version
        return pb.LookupResponse(outcomes=outcomes, events=join_lines(lines), version=version)

    def Put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        lines = _check_put(request, context)
        if request.store in (b"", self._map.store):
            self._put(split_ids(request.ids), lines)
        return pb.PutResponse(version=self._members.membership().version)

    def _put(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """New events: the map has them, or they were sent past the logs."""
        self._filling.put_many(keys, lines)
        self._arrivals.arrive(keys)

    def Arrivals(self, request: pb.ArrivalsRequest, context: grpc.ServicerContext) -> pb.ArrivalsResponse:
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        try:
            position, read_to_us, ids = self._arrivals.after(
                request.after, request.read_to_us, ended, _ARRIVALS_WAIT_S
            )
        except OverloadedError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except UnavailableError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.ArrivalsResponse(ids=ids, position=position, read_to_us=read_to_us)

    def Members(self, request: pb.MembersRequest, context: grpc.ServicerContext) -> pb.MembersResponse:
        membership = self._members.membership()
        return pb.MembersResponse(
            version=membership.version,
            store=self._map.store,
            caches=membership.caches,
            virtual_nodes=self._virtual_nodes,
        )

    def Announce(self, request: pb.AnnounceRequest, context: grpc.ServicerContext) -> pb.MembersResponse:
        wrong = mistake(request.address)  # every client of home dials it
        if wrong is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        if request.leaving:
            self._members.leave(request.address)
        elif not self._members.announce(request.address):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there are too many cache processes")
        return self.Members(pb.MembersRequest(), context)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=msgspec.json.encode(self.status()))


_CACHE_WORKERS: Final = 4
_CACHE_IN_FLIGHT_MAX: Final = 128
_AGAIN_S: Final = 0.2  # after a failure: a busy home must not lose its members
_CALL_TIMEOUT_S: Final = 1.0
FINEST_US: Final = 1.0
"""Lookups in memory are much shorter than what the histogram tells apart by default."""


class CacheServer(eventstore_pb2_grpc.EventStoreServicer):
    """Serves a share of the cache on `listen` and announces itself to the event store at `home`.

    What it has is FOUND, all else is BEHIND: only home can tell what is absent.
    """

    def __init__(
        self, settings: Settings, listen: str, home: str, clock: Clock, network: Network = LOOPBACK
    ) -> None:
        self._server = Server(listen, _CACHE_WORKERS, in_flight_max=_CACHE_IN_FLIGHT_MAX, network=network)
        self._home = home
        self._clock = clock
        self._share = CacheShare(settings.eventstore.cache_bytes)
        self._latency = Histogram(FINEST_US)
        self._channel = network.open(home)
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._started = False
        self._heard = float("-inf")
        self._trouble: str | None = None
        self._announcer = Background("announcer", self._announce)
        self._server.serve_while(self._is_member)
        self._server.add(eventstore_pb2_grpc.add_EventStoreServicer_to_server, self, SERVICE_NAME)

    @property
    def listen(self) -> str:
        """The address it serves on; after `start` with the port that was chosen for `:0`."""
        return self._server.listen

    def start(self) -> None:
        """AddressInUseError if the port is taken. Home need not be there yet."""
        self._server.start()
        self._announcer.start()
        self._started = True

    def stop(self, grace_s: float = 5.0) -> None:
        """Leave: home and its clients ask here no more. Then let calls under way end."""
        self._server.drain()
        self._announcer.stop()
        if self._started:
            self._announce(leaving=True)
        self._server.stop(grace_s)
        self._channel.close()

    def status(self) -> dict[str, Any]:
        return {
            "home": self._home,
            "member": self._is_member(),
            "trouble": self._trouble,
            "cache": self._share.cache.status(),
            "latency_us": {"cache": self._latency.status()},
        }

    def _is_member(self) -> bool:
        """Whether home sends who asks for primary events here, too."""
        return self._clock.monotonic() - self._heard < SILENT_S_MAX

    def _announce(self, leaving: bool = False) -> float:
        """When it is to be done again, in seconds."""
        request = pb.AnnounceRequest(address=self.listen, leaving=leaving)
        try:
            response = self._stub.Announce(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            self._trouble = f"home {self._home} does not answer: {failure_of(error)}"
            return _AGAIN_S
        self._share.belong_to(response.store)
        self._heard, self._trouble = self._clock.monotonic(), None
        return ANNOUNCE_EVERY_S

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        self._check_addressed(request.store, context)
        _check_ids(request.ids, context)
        began = self._clock.monotonic()
        lines = self._share.get_many(request.store, split_ids(request.ids))
        self._latency.count((self._clock.monotonic() - began) * 1e6)
        outcomes, answer = bounded(lines, bytearray([Found.BEHIND * (line is None) for line in lines]))
        return pb.LookupResponse(outcomes=outcomes, events=join_lines(answer))

    def Put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        self._check_addressed(request.store, context)
        lines = _check_put(request, context)
        self._share.put_many(request.store, split_ids(request.ids), lines)
        return pb.PutResponse()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=msgspec.json.encode(self.status()))

    def _check_addressed(self, store: bytes, context: grpc.ServicerContext) -> None:
        if not store:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this process holds a share of the cache only; ask the event store at {self._home}",
            )


def _check_ids(ids: bytes, context: grpc.ServicerContext) -> None:
    if len(ids) % ID_BYTES:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"ids has {len(ids)} bytes, no multiple of {ID_BYTES}: send packed ids",
        )


def _check_put(request: pb.PutRequest, context: grpc.ServicerContext) -> list[bytes]:
    _check_ids(request.ids, context)
    lines = split_lines(request.events) if request.events else []
    if len(lines) * ID_BYTES != len(request.ids) or not all(lines):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send a line, not empty, for each id")
    return lines
