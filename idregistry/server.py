"""A registry replica: each shard's replica on one Raft host, behind one gRPC server (paper 2.1, Fig. 3)."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from idregistry.service import WORKERS, IdRegistryService
from idregistry.shard import Shard
from photon.core.clock import Clock
from photon.core.settings import Registry
from photon.raft.host import RaftHost
from photon.raft.settings import RaftLimits, RaftTiming
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import add_IdRegistryServicer_to_server
from photon.wire.rpc import Server

Address = tuple[str, int]

_HEARTBEAT_S_MAX: Final = 0.05
_HOUSEKEEPING_IN_FLIGHT: Final = 1


class RegistryServer:
    """Hosts `settings.shards` groups. Addresses are `(host, port)` for Raft, `host:port` for gRPC.

    Making one opens and reads its directory: LockedError, CorruptStateError, StorageError.

    `peers`: node id -> Raft address of the OTHER replicas; `addresses`: node id -> gRPC address of every
    replica, told to clients that ask the wrong one. `on_fatal` is called (once, from the raft thread) when
    the replica can't go on: a disk that fails, a state that can't be trusted.
    """

    def __init__(
        self,
        settings: Registry,
        node: str,
        listen: str,
        raft_listen: Address,
        peers: Mapping[str, Address],
        addresses: Mapping[str, str],
        directory: Path,
        secret: bytes,
        clock: Clock,
        rng: random.Random,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._on_fatal = on_fatal
        self._host = RaftHost(
            node=node,
            listen=raft_listen,
            peers=peers,
            directory=directory,
            secret=secret,
            timing=raft_timing(settings),
            limits=RaftLimits(in_flight_max=settings.batches_in_flight_max + _HOUSEKEEPING_IN_FLIGHT),
            rng=rng,
            on_fatal=self._fatal,
        )
        self._shards = [Shard(n, settings, clock, self._host.wake) for n in range(settings.shards)]
        try:
            logs = [self._host.add_group(shard.number, shard.state, shard.on_tick) for shard in self._shards]
            self._rpc = Server(listen, WORKERS)
        except BaseException:
            self._host.stop()  # lets go of the directories that are open already
            raise
        self._service = IdRegistryService(self._shards, logs, addresses, clock, settings.request_timeout_s)
        name = pb.DESCRIPTOR.services_by_name["IdRegistry"].full_name
        self._rpc.add(add_IdRegistryServicer_to_server, self._service, name)

    def start(self) -> None:
        """Join the peers and serve. AddressInUseError if an address is taken."""
        try:
            self._host.start()
            self._rpc.start()
        except BaseException:
            self._host.stop()
            raise

    def stop(self, grace: float = 2.0) -> None:
        """Send who waits elsewhere, let what is in flight end within `grace` seconds, close everything."""
        self._close_shards()
        self._rpc.stop(grace)
        self._host.stop()

    @property
    def address(self) -> str:
        """The gRPC address it serves."""
        return self._rpc.listen

    def status(self) -> dict[str, object]:
        """As the Status RPC."""
        return self._service.status()

    def _fatal(self, error: BaseException) -> None:
        self._close_shards()  # nobody will take what waits any more
        self._on_fatal(error)

    def _close_shards(self) -> None:
        for shard in self._shards:
            shard.close()


def raft_timing(settings: Registry) -> RaftTiming:
    """`registry.election_timeout_ms` -> the log's times: everything else follows from it."""
    election_s = settings.election_timeout_ms / 1000
    heartbeat_s = min(_HEARTBEAT_S_MAX, election_s / 6)
    return RaftTiming(
        election_s_min=election_s,
        election_s_max=2 * election_s,
        heartbeat_s=heartbeat_s,
        leader_fallback_s=max(1.0, 3 * election_s),
    )
