"""A cache process: a share of the CacheEventStore behind gRPC, announced to home (paper 3.4.1)."""

from typing import Any, Final

import grpc

from eventstore.members import ANNOUNCE_EVERY_S, SILENT_S_MAX
from eventstore.service import SERVICE_NAME, CacheService
from eventstore.share import CacheShare
from photon.core.background import Background
from photon.core.clock import Clock
from photon.core.histogram import Histogram
from photon.core.settings import Settings
from photon.wire import eventstore_pb2 as pb
from photon.wire import eventstore_pb2_grpc
from photon.wire.failures import failure_of
from photon.wire.network import LOOPBACK, Network
from photon.wire.rpc import Server

_WORKERS: Final = 4
_IN_FLIGHT_MAX: Final = 128
_AGAIN_S: Final = 0.2  # after a failure: a busy home must not lose its members
_CALL_TIMEOUT_S: Final = 1.0
FINEST_US: Final = 1.0
"""Lookups in memory are much shorter than what the histogram tells apart by default."""


class CacheServer:
    """Serves a share of the cache on `listen` and announces itself to the event store at `home`."""

    def __init__(
        self, settings: Settings, listen: str, home: str, clock: Clock, network: Network = LOOPBACK
    ) -> None:
        self._server = Server(listen, _WORKERS, in_flight_max=_IN_FLIGHT_MAX, network=network)
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
