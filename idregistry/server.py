"""A registry replica: the directory's and each shard's replica on one Raft host, behind one gRPC server
(paper 2.1, Fig. 3). Shards come and go as the directory says.
"""

import random
import resource
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from idregistry.clocks import ClockWatch
from idregistry.configuration import SHARDS_MAX
from idregistry.coordinator import Coordinator, OpenShard
from idregistry.directory import DIRECTORY_GROUP, DirectoryState
from idregistry.directory_commands import IDENTITY_BYTES, Row
from idregistry.directory_service import DirectoryHandlers
from idregistry.hosting import Hosting
from idregistry.service import IN_FLIGHT_MAX, REQUEST_BYTES_MAX, WORKERS, IdRegistryService
from idregistry.shard import Shard
from idregistry.waiting import Waiting
from photon.core.addresses import joined
from photon.core.clock import Clock
from photon.core.settings import Registry
from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import ReplicatedLog
from photon.raft.settings import RaftLimits, RaftTiming
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import add_IdRegistryServicer_to_server
from photon.wire.network import LOOPBACK, Network
from photon.wire.rpc import Server

Address = tuple[str, int]

_HEARTBEAT_S_MAX: Final = 0.05
_HOUSEKEEPING_IN_FLIGHT: Final = 1
_DESCRIPTORS_PER_GROUP: Final = 2
_DESCRIPTORS_RESERVED: Final = 128
"""For connections, logs, and files that are open for a moment."""


class RegistryServer:
    """Addresses are `(host, port)` for Raft, `host:port` for gRPC.

    Making one opens and reads its directory: LockedError, CorruptStateError, StorageError.

    `raft_dialed`: where the others reach its Raft port, if not where it listens (a proxy, a mapped port).
    `network`: TLS for both ports, and what this process dials for an address.
    `peers`: node id -> Raft address of the OTHER replicas; `addresses`: node id -> gRPC address of every
    replica, told to clients that ask the wrong one. The replicas named found the registry together, unless
    this one is `joining` one that is there: then it waits until it is told to take another's place.
    `on_fatal` is called (once, from the raft thread) when the replica can't go on: a disk that fails, a state
    that can't be trusted.
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
        *,
        raft_dialed: Address | None = None,
        joining: bool = False,
        network: Network = LOOPBACK,
    ) -> None:
        network.check_listen(joined(*raft_listen))
        self._on_fatal = on_fatal
        self._settings = settings
        self._clock = clock
        self._state = DirectoryState()
        raft = {**peers, node: raft_dialed or raft_listen}
        rows = {name: Row(name, host, port, addresses[name]) for name, (host, port) in raft.items()}
        self._hosting = Hosting(node, rows, directory, self._make_shard)
        self._clocks = ClockWatch(node, lambda: self._hosting.rows, clock, network)
        self._host = RaftHost(
            Endpoint(node, raft_listen, secret, network.tls, network.dialed),
            peers={r.name: (r.raft_host, r.raft_port) for r in self._hosting.rows.values() if r.name != node},
            directory=directory,
            timing=raft_timing(settings),
            limits=RaftLimits(in_flight_max=settings.batches_in_flight_max + _HOUSEKEEPING_IN_FLIGHT),
            rng=rng,
            on_fatal=self._fatal,
        )
        founders = tuple(rows[name] for name in sorted(rows))
        self._coordinator = Coordinator(
            self._state,
            founders,
            settings,
            clock,
            self._host.wake,
            self._open_shards,
            secrets.token_bytes(IDENTITY_BYTES),
            shards_that_fit(),
        )
        try:
            log = self._host.add_group(
                DIRECTORY_GROUP, self._state, self._on_tick, None if joining else sorted(rows)
            )
            self._hosting.open_groups(self._host)
            self._rpc = Server(listen, WORKERS, IN_FLIGHT_MAX, network, REQUEST_BYTES_MAX)
            self._rpc.serve_while(lambda: self._has_quorum(log))
        except BaseException:
            self._host.stop()  # lets go of the directories that are open already
            raise
        self._service = self._make_service(log)
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
        if self._settings.retention_days > 0:
            self._clocks.start()

    def stop(self, grace: float = 2.0) -> None:
        """Send who waits elsewhere, let what is in flight end within `grace` seconds, close everything.

        What this replica leads is handed over.
        """
        self._rpc.drain()
        self._close_queues()
        self._clocks.stop()
        self._rpc.stop(grace)
        self._host.stop()

    @property
    def address(self) -> str:
        """The gRPC address it serves."""
        return self._rpc.listen

    def status(self) -> dict[str, object]:
        """As the Status RPC."""
        return self._service.status()

    def _make_shard(self, number: int) -> Shard:
        return Shard(
            number, self._settings, self._clock, self._host.wake, self._state, self._clocks.trusted_us
        )

    def _make_service(self, log: ReplicatedLog) -> IdRegistryService:
        def address_of(name: str) -> str:
            row = self._hosting.rows.get(name)
            return "" if row is None else row.grpc

        waiting = Waiting(address_of, self._clock, self._settings.request_timeout_s)
        directory = DirectoryHandlers(
            self._state,
            log,
            self._coordinator,
            lambda: self._hosting.rows,
            lambda: self._hosting.shards,
            waiting,
        )
        return IdRegistryService(lambda: self._hosting.shards, directory, waiting, self._clock)

    def _has_quorum(self, directory: ReplicatedLog) -> bool:
        """Whether this replica knows a leader with a majority of each group that it hosts.

        Without one nothing can be registered through it; it goes on answering lookups.
        """
        logs = [directory, *(hosted.log for hosted in self._hosting.shards.values())]
        return all(log.status().has_quorum for log in logs)

    def _on_tick(self, log: ReplicatedLog) -> None:
        """The directory's turn. Raft thread."""
        if self._hosting.follow(self._host, self._state.view):
            self._host.wake()  # every shard has something to look at
        self._coordinator.on_tick(log)

    def _open_shards(self) -> Mapping[int, OpenShard]:
        return {n: OpenShard(one.shard.state, one.log.members) for n, one in self._hosting.shards.items()}

    def _fatal(self, error: BaseException) -> None:
        self._close_queues()  # nobody will take what waits any more
        self._on_fatal(error)

    def _close_queues(self) -> None:
        self._coordinator.close()
        self._hosting.close()


def shards_that_fit() -> int:
    """How many shards this process can open the files of."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return SHARDS_MAX
    groups = (soft - _DESCRIPTORS_RESERVED) // _DESCRIPTORS_PER_GROUP
    return max(1, min(SHARDS_MAX, groups - 1))  # the directory is a group too


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
