"""The processes of the EventStore: home, with reader, cache, log file map and logs store (paper 3.4), and a
cache process, which holds a share of the CacheEventStore and is announced to home (paper 3.4.1).
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from eventstore.cache import CacheEventStore, CacheShare
from eventstore.filling import ANNOUNCE_EVERY_S, SILENT_S_MAX, Filling, Members
from eventstore.log_file_map import LogFileMap
from eventstore.lookup import EventLookup, LogsEventStore, ReaderState
from eventstore.reader import Reader, ReadOn
from eventstore.segments import LOADING_LETTERS, identity_of
from eventstore.service import SERVICE_NAME, CacheService, EventStoreService, HomeParts
from photon.core.clock import Background, Clock
from photon.core.disk import storage_errors
from photon.core.settings import MIB, Settings
from photon.core.status import Histogram, Notices
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines, json_lines
from photon.logs.writer import RotatingLog
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network, failure_of
from photon.rpc.servers import Server

_WORKERS: Final = 8
_IN_FLIGHT_MAX: Final = 256
_DEAD_LETTER_FILE_BYTES_MAX: Final = 256 * MIB


class EventStoreServer:
    """Serves EventStore on `listen`; reads the logs that match `patterns` and keeps a map in `directory`.

    Malformed lines go to `dead_letters`/primary-NNNNNN.jsonl. `drain`: the logs will grow no more.
    `on_fatal` is told, from the reader's thread, of an error that only a restart or the user can mend.
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
        self._server = Server(listen, _WORKERS, in_flight_max=_IN_FLIGHT_MAX, network=network)
        self._map = LogFileMap(directory / "map", settings.eventstore, identity_of(settings))
        self._cache = CacheEventStore(settings.eventstore.cache_bytes)
        self._notices = Notices("eventstore")
        with storage_errors(dead_letters):
            (dead_letters / LOADING_LETTERS).unlink(missing_ok=True)  # of a load that was killed
        self._dead_letters = RotatingLog(dead_letters, "primary", _DEAD_LETTER_FILE_BYTES_MAX)

        def make_format() -> JsonLines:
            """For one thread each."""
            return json_lines(settings)

        members = self._members = Members()
        self._clock = clock
        self._filling = Filling(
            self._cache,
            lambda: members.membership(clock.monotonic()),
            settings.eventstore.virtual_nodes,
            self._map.store,
            network,
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
        )
        self._reader = Reader(
            follower,
            self._map,
            self._filling.put_many,
            make_format(),
            self._dead_letters,
            settings.logs,
            clock,
            self._notices,
            on_fatal,
            wake,
        )
        self._logs = LogsEventStore(self._map, make_format, notice=self._notices.tell)
        self._read_on = ReadOn(
            lambda: self._reader.positions,
            self._map.last_files,
            make_format(),
            settings.eventstore.read_on_bytes_max,
            clock,
        )
        self._lookup = EventLookup(
            self._cache, self._logs, self._reader_state, clock, self._filling.put_many, self._read_on
        )
        service = EventStoreService(
            HomeParts(
                self._lookup,
                self._filling,
                members,
                clock,
                self._map.store,
                settings.eventstore.virtual_nodes,
                self.status,
            )
        )
        self._server.serve_while(lambda: self._reader.storage_error is None)
        self._server.add(eventstore_pb2_grpc.add_EventStoreServicer_to_server, service, SERVICE_NAME)

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
        self._server.stop(grace_s)
        self._reader.stop()
        self._filling.close()
        self._dead_letters.close()
        self._map.close()

    def lookup(self, ids: bytes) -> tuple[bytes, list[bytes]]:
        """What the Lookup call answers: core.fates.Found column and lines."""
        return self._lookup.look_up(ids)

    def status(self) -> dict[str, Any]:
        """What the Status call says."""
        reader, cache, logs = self._reader, self._cache, self._logs
        return {
            "primary_events": reader.counts.primary_events,
            "malformed": reader.counts.malformed,
            "caught_up": reader.caught_up,
            "cache": {
                "hits": cache.hits,
                "misses": cache.misses,
                "bytes": cache.held_bytes,
                "events": cache.events,
            },
            "logs": {"hits": logs.hits, "misses": logs.misses, "bytes_read": logs.bytes_read},
            "read_on": {"hits": self._read_on.hits, "bytes_read": self._read_on.bytes_read},
            "latency_us": {
                "cache": self._lookup.cache_latency.status(),
                "logs": self._lookup.logs_latency.status(),
            },
            "members": self._members.membership(self._clock.monotonic()).caches,
            "fill": {
                "sent": self._filling.sent,
                "dropped": self._filling.dropped,
                "waiting_bytes": self._filling.waiting_bytes,
            },
            "map_bytes": self._map.disk_bytes,
            "map_entries": self._map.entries(),
            "map_swept": self._map.swept,
            "map_trouble": self._map.trouble,
            "notices": self._notices.lines(),
            "unended": reader.unended,
            "unreadable": reader.unreadable,
            "storage_error": reader.storage_error,
        }

    def _reader_state(self) -> ReaderState:
        return ReaderState(self._reader.caught_up, bool(self._reader.unreadable))


_CACHE_WORKERS: Final = 4
_CACHE_IN_FLIGHT_MAX: Final = 128
_AGAIN_S: Final = 0.2  # after a failure: a busy home must not lose its members
_CALL_TIMEOUT_S: Final = 1.0
FINEST_US: Final = 1.0
"""Lookups in memory are much shorter than what the histogram tells apart by default."""


class CacheServer:
    """Serves a share of the cache on `listen` and announces itself to the event store at `home`."""

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
        self._announcer = Background("announcer", self._announce_again)
        service = CacheService(self._share, home, clock, self._latency, self.status)
        self._server.serve_while(self._is_member)
        self._server.add(eventstore_pb2_grpc.add_EventStoreServicer_to_server, service, SERVICE_NAME)

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
        """What the Status call says."""
        cache = self._share.cache
        return {
            "home": self._home,
            "member": self._is_member(),
            "trouble": self._trouble,
            "cache": {
                "hits": cache.hits,
                "misses": cache.misses,
                "bytes": cache.held_bytes,
                "events": cache.events,
            },
            "latency_us": {"cache": self._latency.status()},
        }

    def _is_member(self) -> bool:
        """Whether home sends who asks for primary events here, too."""
        return self._clock.monotonic() - self._heard < SILENT_S_MAX

    def _announce_again(self) -> float:
        return ANNOUNCE_EVERY_S if self._announce() else _AGAIN_S

    def _announce(self, leaving: bool = False) -> bool:
        request = pb.AnnounceRequest(address=self.listen, leaving=leaving)
        try:
            response = self._stub.Announce(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            self._trouble = f"home {self._home} does not answer: {failure_of(error)}"
            return False
        self._share.belong_to(response.store)
        self._heard, self._trouble = self._clock.monotonic(), None
        return True
