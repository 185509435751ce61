"""A registry replica: the directory's and each shard's replica on one Raft host, behind one gRPC server
(paper 2.1, Fig. 3). Shards come and go as the directory says.
"""

import random
import resource
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from idregistry.coordinator import Coordinator, Hosting
from idregistry.peers import Peers
from idregistry.rules.commands import IDENTITY_BYTES, Found, Row
from idregistry.rules.directory import DIRECTORY_GROUP, DirectoryState
from idregistry.rules.sharding import BEGINNING, SHARDS_MAX
from idregistry.rules.steward import in_turn, reached_us
from idregistry.service import IN_FLIGHT_MAX, REQUEST_BYTES_MAX, WORKERS, IdRegistryService
from idregistry.shard import Shard
from photon.core.addresses import joined
from photon.core.clock import Clock
from photon.core.settings import MAIN_SET, Registry
from photon.raft.addresses import Address, Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import RaftLimits, RaftTiming, ReplicatedLog
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import add_IdRegistryServicer_to_server
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server

_HEARTBEAT_S_MAX: Final = 0.25
_SWITCH_S: Final = 0.0005
_HOUSEKEEPING_IN_FLIGHT: Final = 1
_DESCRIPTORS_PER_GROUP: Final = 2
_DESCRIPTORS_RESERVED: Final = 128
"""For connections, logs, and files that are open for a moment."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as its settings have it: where it listens, and where each replica is reached, this one too.

    `rows`: node id -> its Raft address, perhaps a proxy's, and the gRPC address that clients are told. Those
    named found the registry together, unless this one is `joining` one that is there: then it waits until it
    is told to take another's place. `spread_us`: Configuration's, of a registry that is founded now.
    """

    name: str
    listen: str
    raft_listen: Address
    rows: Mapping[str, Row]
    directory: Path
    secret: bytes
    joining: bool = False
    spread_us: int = 0


class RegistryServer:
    """Making one opens and reads its directory: LockedError, CorruptStateError, StorageError.

    `network`: TLS for both ports, and what this process dials for an address. `on_fatal` is called (once,
    from the raft thread) when the replica can't go on: a disk that fails, a state that can't be trusted.
    """

    def __init__(
        self,
        me: Replica,
        settings: Registry,
        clock: Clock,
        rng: random.Random,
        on_fatal: Callable[[BaseException], None],
        network: Network = LOOPBACK,
    ) -> None:
        network.check_listen(joined(*me.raft_listen))
        self._on_fatal = on_fatal
        self._settings = settings
        self._clock = clock
        self._state = DirectoryState()
        self._hosting = Hosting(me.name, me.rows, me.directory, self._make_shard, settings.leaders)
        self._peers = Peers(me.name, lambda: self._hosting.rows, clock, network, self._asks_peers)
        self._host = RaftHost(
            Endpoint(me.name, me.raft_listen, me.secret, network.tls, network.dialed),
            peers={
                r.name: (r.raft_host, r.raft_port) for r in self._hosting.rows.values() if r.name != me.name
            },
            directory=me.directory,
            timing=raft_timing(settings),
            limits=RaftLimits(in_flight_max=settings.batches_in_flight_max + _HOUSEKEEPING_IN_FLIGHT),
            rng=rng,
            on_fatal=self._fatal,
        )
        founders = tuple(me.rows[name] for name in sorted(me.rows))
        of_main = in_turn(0, [row.name for row in founders if row.set == MAIN_SET], settings.leaders)
        self._coordinator = Coordinator(
            self._state,
            Found(0, settings.shards, founders, secrets.token_bytes(IDENTITY_BYTES), me.spread_us),
            settings,
            clock,
            self._host.wake,
            self._hosting,
            self._reached_us,
            shards_that_fit(),
            self._peers,
        )
        try:
            log = self._host.add_group(
                DIRECTORY_GROUP,
                self._state,
                self._coordinator.on_tick,
                of_main if me.name in of_main and not me.joining else None,
            )
            self._hosting.open_groups(self._host)
            self._rpc = Server(me.listen, WORKERS, IN_FLIGHT_MAX, network, REQUEST_BYTES_MAX)
            self._rpc.serve_while(lambda: self._has_quorum(log))
        except BaseException:
            self._host.stop()  # lets go of the directories that are open already
            raise
        self._log = log
        self._service = IdRegistryService(
            self._state, log, self._coordinator, self._hosting, clock, settings.request_timeout_s
        )
        self.status = self._service.status
        name = pb.DESCRIPTOR.services_by_name["IdRegistry"].full_name
        self._rpc.add(add_IdRegistryServicer_to_server, self._service, name)

    def start(self) -> None:
        """Join the peers and serve. AddressInUseError if an address is taken."""
        # The raft thread gives the interpreter away at each system call, and is to have it back soon.
        sys.setswitchinterval(_SWITCH_S)
        try:
            self._host.start()
            self._rpc.start()
        except BaseException:
            self._host.stop()
            raise
        self._peers.start()

    def stop(self, grace: float = 2.0) -> None:
        """Send who waits elsewhere, let what is in flight end within `grace` seconds, close everything.

        What this replica leads is handed over.
        """
        self._rpc.drain()
        self._coordinator.close()
        self._peers.stop()
        self._rpc.stop(grace)
        self._host.stop()

    @property
    def address(self) -> str:
        """The gRPC address it serves."""
        return self._rpc.listen

    def _make_shard(self, group: int) -> Shard:
        clocks = self._reached_us, self._furthest_us
        return Shard(group, self._settings, self._clock, self._host.wake, self._state, *clocks)

    def _asks_peers(self) -> bool:
        return self._settings.retention_days > 0 or bool(self._state.view.following)

    def _furthest_us(self) -> int:
        return max([self._hosting.furthest_us(), *(fact.boundary_us for fact in self._peers.facts())])

    def _reached_us(self) -> int | None:
        hosted = [one.state.latest_us for one in self._hosting.shards.values()]
        newest_us = max([*hosted, *(fact.latest_us for fact in self._peers.facts())], default=BEGINNING)
        return reached_us(self._log, self._peers.trusted_us(), newest_us)

    def _has_quorum(self, directory: ReplicatedLog) -> bool:
        """Whether this replica knows a leader with a majority of each group that it hosts.

        Without one nothing can be registered through it; it goes on answering lookups.
        """
        logs = [directory, *(hosted.log for hosted in self._hosting.shards.values())]
        return all(log.status().has_quorum for log in logs)

    def _fatal(self, error: BaseException) -> None:
        self._coordinator.close()  # nobody will take what waits any more
        self._on_fatal(error)


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
    heartbeat_s = min(_HEARTBEAT_S_MAX, election_s / 4)
    return RaftTiming(
        election_s_min=election_s,
        election_s_max=2 * election_s,
        heartbeat_s=heartbeat_s,
        leader_fallback_s=max(1.0, 3 * election_s),
    )
