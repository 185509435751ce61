"""A process of the EventStore: reader, cache, log file map and logs store (paper 3.4). A datacenter may have
several, all alike (eventstore/peers.py).

Calls have columns in and columns out (photon/rpc/eventstore.proto), and errors as status codes.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from eventstore.arrivals import Arrivals
from eventstore.cache import Block, CacheEventStore, Filling
from eventstore.log_file_map import LogFileMap
from eventstore.lookup import EventLookup, LogsEventStore
from eventstore.peers import Peers
from eventstore.read_on import ReadOn
from eventstore.reader import Reader, follower_of
from eventstore.segments import LOADING_LETTERS, identity_of
from photon.core.addresses import mistake
from photon.core.clock import Clock
from photon.core.columns import count_lines, join_lines, split_ids, split_lines
from photon.core.disk import storage_errors
from photon.core.errors import OverloadedError, PhotonError, UnavailableError
from photon.core.ids import ID_BYTES
from photon.core.settings import BATCH_IDS_MAX, MIB, Settings
from photon.core.status import Notices
from photon.logs.formats import json_lines
from photon.logs.writer import RotatingLog
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["EventStore"].full_name
_WORKERS: Final = 8
_IN_FLIGHT_MAX: Final = 256
_ARRIVALS_WAIT_S: Final = 15.0
_LISTENERS_A_DISPATCHER: Final = 2
"""One listens; of one that was killed, a call may not have ended yet."""
_DEAD_LETTER_FILE_BYTES_MAX: Final = 256 * MIB


class EventStoreServer(eventstore_pb2_grpc.EventStoreServicer):
    """Serves EventStore on `listen`, reads the logs that match `patterns`, keeps a map in `directory`.

    `peers`: addresses of the datacenter's others; each reads a part of the logs. Malformed lines go to
    `dead_letters`/primary-NNNNNN.jsonl, of the `number`th to primary-NUMBER-NNNNNN.jsonl. `drain`: the logs
    will grow no more. `on_fatal` gets, in the reader's thread, an error that only a restart or the user can
    mend.
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
        peers: Sequence[str] = (),
        dispatchers: int = 1,
        number: int = 0,
    ) -> None:
        """`dispatchers`: how many processes of them wait for arrivals.

        CorruptStateError, LockedError, SettingsError, StorageError, UsageError.
        """
        own = settings.eventstore
        listeners = _LISTENERS_A_DISPATCHER * dispatchers
        self._arrivals = Arrivals(listeners)
        # Each that waits for arrivals or follows has a thread; as many are left to lookups. As many as are
        # known here may come that are not.
        workers = _WORKERS + listeners + 2 * max(1, len(peers))
        self._server = Server(listen, workers, in_flight_max=_IN_FLIGHT_MAX, network=network)
        self._map = LogFileMap(directory / "map", own, identity_of(settings))
        self._cache = CacheEventStore(own.cache_bytes)
        self._notices = Notices("eventstore")
        with storage_errors(dead_letters):
            (dead_letters / LOADING_LETTERS).unlink(missing_ok=True)  # of a load that was killed
        stem = f"primary-{number}" if number else "primary"
        self._dead_letters = RotatingLog(dead_letters, stem, _DEAD_LETTER_FILE_BYTES_MAX)
        wake = threading.Event()
        self._peers = Peers(
            listen, peers, own.virtual_nodes, clock, self._serves, wake.set, network, self._arrivals.tell_all
        )
        self._filling = Filling(self._cache, self._peers, network)
        follower = follower_of(
            self._map, patterns, directory, settings.logs, clock, self._notices, wake, drain
        )
        self._reader = Reader(
            follower,
            self._map,
            self._take_in,
            json_lines(settings),
            self._dead_letters,
            settings.logs,
            clock,
            self._notices,
            on_fatal,
            wake,
            self._arrivals.read_to,
            self._peers,
            self._arrivals.arrive,
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
        self._peers.start(self._server.listen)
        self._reader.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let lookups and the reader's transaction end. What is not on disk is read again next time."""
        self._peers.stop()
        self._arrivals.close()
        self._server.stop(grace_s)
        self._reader.stop()
        self._filling.close()
        self._dead_letters.close()
        self._map.close()

    def lookup(self, ids: bytes) -> tuple[bytes, list[bytes]]:
        """As the Lookup call: core.fates.Found column and lines."""
        return self._lookup.look_up(ids)

    def _serves(self) -> bool:
        """Whether it can be asked, and given logs to read."""
        return self._reader.has_caught_up and self._reader.storage_error is None

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
            "members": self._peers.membership().members,
            "serves": self._serves(),
            "peers": self._peers.status(),
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
            outcomes, lines = self.lookup(request.ids)
        except PhotonError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        version = self._peers.membership().version
        return pb.LookupResponse(outcomes=outcomes, events=join_lines(lines), version=version)

    def Put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        lines = _check_put(request, context)
        keys = split_ids(request.ids)
        if request.filled:
            self._cache.put_many(keys, lines)
        else:
            self._filling.put_many(keys, lines)
        self._arrivals.arrive(request.ids)
        return pb.PutResponse(version=self._peers.membership().version)

    def _take_in(self, block: Block) -> None:
        """New events, which the map has."""
        self._filling.put_block(block)
        self._arrivals.arrive(block.ids)

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
        version = self._peers.membership().version
        return pb.ArrivalsResponse(ids=ids, position=position, read_to_us=read_to_us, version=version)

    def Members(self, request: pb.MembersRequest, context: grpc.ServicerContext) -> pb.MembersResponse:
        membership = self._peers.membership()
        return pb.MembersResponse(
            version=membership.version, members=membership.members, virtual_nodes=self._peers.virtual_nodes
        )

    def Follow(self, request: pb.FollowRequest, context: grpc.ServicerContext) -> pb.FollowResponse:
        wrong = mistake(request.address)  # all others are told to dial it
        if wrong is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        return self._peers.answer(request)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=msgspec.json.encode(self.status()))


def _check_ids(ids: bytes, context: grpc.ServicerContext) -> None:
    count, rest = divmod(len(ids), ID_BYTES)
    if rest or count > BATCH_IDS_MAX:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"ids has {len(ids)} bytes: send {ID_BYTES} an id, at most {BATCH_IDS_MAX} ids",
        )


def _check_put(request: pb.PutRequest, context: grpc.ServicerContext) -> list[bytes]:
    _check_ids(request.ids, context)
    # Counted before they are split: 3 MiB of newlines would be 3 million lines.
    counted = count_lines(request.events) * ID_BYTES == len(request.ids)
    lines = split_lines(request.events) if counted else []
    if not counted or not all(lines) or request.events[-1:] not in (b"", b"\n"):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send a line, not empty, for each id")
    return lines
