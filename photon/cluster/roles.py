"""The roles that processes of a system have: a table of all that differs between them, and how one is served.

A process is made of its parts from the settings, and serves until SIGTERM.

Exit status 2 for settings that can't be used, 3 for state that can't be trusted (a restart mends neither), 4
where the address to listen on is taken, 1 for anything else (a restart may mend it).
"""

import contextlib
import gc
import logging
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from photon.cluster.supervisor import ADDRESS_STATUS, CORRUPT_STATUS
from photon.cluster.topology import Pipeline, Process, Replica, Topology
from photon.connect.copies import copies_of
from photon.core.addresses import joined, parts, split_address
from photon.core.clock import Background, SteadyClock, SystemClock
from photon.core.disk import make_directory, storage_errors
from photon.core.errors import (
    AddressInUseError,
    CorruptStateError,
    DiskFullError,
    PhotonError,
    UnavailableError,
    UsageError,
)
from photon.core.protocol import mark
from photon.core.settings import identity_digest
from photon.core.signals import on_termination
from photon.rpc.network import Network, Tls, expiry_complaint

# The nursery imports this before all else, and the rooms take long: they are imported, where they are needed.
if TYPE_CHECKING:
    from idregistry.client import RegistryClient

LOOK_EVERY_S: Final = 6 * 3600.0
_LOOK_AFTER_S: Final = 1.0
_COLLECT_AFTER: Final = 20_000
"""New container objects between two looks for cycles; Python's own is a few hundred."""

_Fail = Callable[[BaseException], None]


class _Server(Protocol):
    def start(self) -> None: ...

    def stop(self) -> object: ...

    def status(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process. Its metrics are in photon.rpc.metrics, its section in photon.core.settings."""

    name: str
    """First word of the command that serves it, and of what its processes are called."""
    text: str
    """Of that command's help."""
    imports: tuple[str, ...]
    """What the nursery imports before it forks one."""
    make: Callable[[Topology, Process, Network, _Fail], _Server]


def serve_role(role: str, topology: Topology, name: str) -> None:
    """Run one role until it is told to stop. PhotonError for what keeps it from starting."""
    # A registry replica has files and sockets for each of its shards: as many as the system allows.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" may be more than the kernel's own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    failure: list[BaseException] = []
    told = threading.Event()

    def fail(error: BaseException) -> None:
        failure.append(error)
        told.set()

    try:
        process = topology.process(role, name)
        network = topology.network(process.datacenter)
        mark(_home(topology, process) / f"protocol-{process.number}")
        server = ROLES[role].make(topology, process, network, fail)
        on_termination(told.set)
        # Batches are bytes and arrays, which hold no cycles: don't walk all modules to find none.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
        _start(topology, process, server, network)
    except (CorruptStateError, AddressInUseError) as error:
        _end(error)
    while not told.wait(_LOOK_AFTER_S):
        pass  # Python's handler of a signal runs in this thread; one that another thread got does not wake it
    if failure:
        # The room can't go on; what it still holds is on disk or was never acknowledged.
        _end(failure[0])
    server.stop()


def _home(topology: Topology, process: Process) -> Path:
    if process.role == "registry":
        return Path(topology.replica(process.name).directory)
    return topology.pipeline(process.datacenter).home(process.role, process.number)


def _start(topology: Topology, process: Process, server: _Server, network: Network) -> None:
    """AddressInUseError if one of its ports is taken; for that of metrics before anybody is served."""
    watch_expiry(network.tls)
    started = threading.Event()
    address = topology.metrics.get(process.title)
    if address is not None:
        from photon.rpc.metrics import serve_metrics

        def status() -> dict[str, Any]:
            if not started.is_set():
                raise UnavailableError(f"{process.title} is starting; ask again")
            return server.status()

        if process.listen:  # metrics have no such setting: they are bound where gRPC is
            address = joined(parts(process.listen)[0], parts(address)[1])
            network = replace(network, bind="")
        serve_metrics(address, process.role, process.title, status, network)
    server.start()
    started.set()


def _end(error: BaseException) -> NoReturn:
    """Bad usage is also a replica that was replaced: it never comes back."""
    told = {
        CorruptStateError: CORRUPT_STATUS,
        AddressInUseError: ADDRESS_STATUS,
        UsageError: UsageError.exit_status,
    }
    status = next((status for kind, status in told.items() if isinstance(error, kind)), 1)
    if not isinstance(error, PhotonError):
        logging.getLogger("photon").critical("unexpected", exc_info=error)
    sys.stderr.write(f"photon: {error or type(error).__name__}\n")
    sys.stderr.flush()
    os._exit(status)


def watch_expiry(tls: Tls | None) -> None:
    """Complain in the log, now and every few hours, once the certificate that was loaded ends soon: a newer
    file counts after a restart only."""
    if tls is None:
        return

    def look() -> float:
        complaint = expiry_complaint(tls, time.time())
        if complaint is not None:
            logging.getLogger("photon.tls").warning("%s", complaint)
        return LOOK_EVERY_S

    Background("expiry", look).start()


def _registry(topology: Topology, process: Process, network: Network, fail: _Fail) -> _Server:
    from idregistry import server
    from idregistry.rules.commands import Row

    me = topology.replica(process.name)
    replica = server.Replica(
        name=me.name,
        listen=me.listen_grpc or network.bound(me.grpc),
        raft_listen=_raft_listen(me, network),
        rows={r.name: Row(r.name, *r.raft_address, r.grpc, r.set) for r in topology.replicas},
        directory=Path(me.directory),
        secret=bytes.fromhex(topology.secret),
        joining=me.joining,
        spread_us=round(topology.settings.ids.time_spread_max_s * 1e6),
    )
    settings, clock = topology.settings.registry, SystemClock()
    made = server.RegistryServer(replica, settings, clock, random.Random(), fail, replace(network, bind=""))
    if (warning := topology.crowded()) is not None:
        logging.getLogger("photon.registry").warning("%s", warning)
    return made


def _raft_listen(replica: Replica, network: Network) -> tuple[str, int]:
    if replica.listen_raft:
        return split_address(replica.listen_raft, f"'replicas.{replica.name}.listen_raft'")
    host, port = replica.raft_address
    return network.bind.strip("[]") or host, port


def _importer(topology: Topology, process: Process, network: Network, fail: _Fail) -> _Server:
    from photon.connect.server import ImporterServer

    pipeline = topology.pipeline(process.datacenter)
    return ImporterServer(
        topology.settings,
        name=process.title,
        datacenter=process.datacenter,
        listen=process.address,
        directory=pipeline.home("importer"),
        sources=topology.sources_of(pipeline),
        drain=topology.drain,
        fail=fail,
        network=network,
    )


def _eventstore(topology: Topology, process: Process, network: Network, fail: _Fail) -> _Server:
    from eventstore.server import EventStoreServer

    pipeline = topology.pipeline(process.datacenter)
    home = pipeline.home("eventstore", process.number)
    _make_directories(topology, pipeline)
    server = EventStoreServer(
        topology.settings,
        listen=process.address,
        directory=home,
        patterns=topology.patterns_of(pipeline, "primary"),
        dead_letters=topology.dead_letters_directory(process.datacenter),
        clock=SystemClock(),
        drain=topology.drain,
        on_fatal=fail,
        network=network,
        peers=pipeline.eventstores,
        dispatchers=len(pipeline.dispatchers),
        number=process.number,
    )
    registry = _registry_client(topology, process.datacenter, network)
    return _Watched(server, fail, lambda: _recognise(registry, home))


def _make_directories(topology: Topology, pipeline: Pipeline) -> None:
    """Those of the copies that an importer makes: it may be slower than who reads them."""
    for side, texts in topology.sources_of(pipeline).items():
        for text in texts:
            directory = copies_of(pipeline.home("importer"), side, text)
            with storage_errors(directory):
                make_directory(directory)


def _recognise(registry: "RegistryClient", home: Path) -> None:
    """Return once the registry is known to be the one that `home` remembers. CorruptStateError."""
    while True:
        try:
            registry.recognise(home)
            break
        except (UnavailableError, DiskFullError):
            time.sleep(_LOOK_AFTER_S)
    registry.close()


def _joiner(topology: Topology, process: Process, network: Network, fail: _Fail) -> _Server:
    from eventstore.client import EventStoreClient
    from joiner.server import JoinerServer
    from joiner.worker import Home, Worker

    settings, pipeline = topology.settings, topology.pipeline(process.datacenter)
    joiner = Home(
        name=process.title,
        datacenter=process.datacenter,
        address=process.address,
        directory=pipeline.home("joiner", process.number),
        output_root=Path(topology.output),
        drain=topology.drain,
        is_sole=not topology.run,
    )
    registry = _registry_client(topology, process.datacenter, network)
    timeout_s = settings.eventstore.request_timeout_s
    eventstore = EventStoreClient(pipeline.eventstores, timeout_s, network=network)
    return JoinerServer(Worker(settings, joiner, registry, eventstore, SystemClock(), fail), network)


def _dispatcher(topology: Topology, process: Process, network: Network, fail: _Fail) -> _Server:
    from dispatcher.server import DispatcherServer
    from dispatcher.shares import Place
    from dispatcher.worker import Site
    from eventstore.client import EventStoreClient
    from joiner.client import JoinerClient

    settings, pipeline = topology.settings, topology.pipeline(process.datacenter)
    _make_directories(topology, pipeline)
    joiner = JoinerClient(
        pipeline.joiners,
        settings.dispatcher.request_timeout_s,
        network=network,
        identity=identity_digest(settings),
    )
    place = None
    if not topology.run:
        place = Place(
            dispatchers_group(process.datacenter),
            process.title,
            SystemClock().now_us(),
            process.address,
            topology.shares_of(pipeline),
        )
    site = Site(
        settings=settings,
        datacenter=process.datacenter,
        number=process.number,
        directory=pipeline.home("dispatcher", 0 if place is None else process.number),
        patterns=topology.patterns_of(pipeline, "foreign"),
        dead_letters=topology.dead_letters_directory(process.datacenter),
        registry=_registry_client(topology, process.datacenter, network),
        joiner=joiner,
        clock=SteadyClock(SystemClock()),
        rng=random.Random(),
        drain=topology.drain,
        make_eventstore=lambda: EventStoreClient(
            pipeline.eventstores, settings.eventstore.request_timeout_s, network=network
        ),
        joiners={address: one.datacenter for one in topology.pipelines for address in one.joiners},
    )
    server = DispatcherServer(site, process.title, process.address, network, len(pipeline.dispatchers), place)
    return _Watched(server, fail, server.wait)


def dispatchers_group(datacenter: str) -> str:
    """By which the registry's directory knows a datacenter's dispatchers and their shares of the logs."""
    return f"{datacenter}-dispatchers"


class _Watched:
    """A role beside which a thread watches: what `watch` raises is the process's failure."""

    def __init__(self, role: _Server, fail: _Fail, watch: Callable[[], object]) -> None:
        self._role, self._fail, self._watch_it = role, fail, watch
        self.stop, self.status = role.stop, role.status

    def start(self) -> None:
        self._role.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._watch_it()
        except BaseException as error:
            self._fail(error)


def _registry_client(topology: Topology, datacenter: str, network: Network) -> "RegistryClient":
    from idregistry.client import RegistryClient

    replicas = [replica.grpc for replica in topology.nearest_first(datacenter)]
    timeout_s = topology.settings.registry.request_timeout_s
    return RegistryClient(replicas, timeout_s, SystemClock(), random.Random(), network)


_ROWS: Final = (
    Role(
        "registry",
        "The IdRegistry: one process hosts a replica of every shard.",
        ("photon.cli.roles", "idregistry.server"),
        _registry,
    ),
    Role(
        "importer",
        "The importer: copies events from Kafka or tables into log files.",
        ("photon.connect.server",),
        _importer,
    ),
    Role(
        "eventstore",
        "The EventStore: finds primary events in cache and logs.",
        ("eventstore.server", "idregistry.client"),
        _eventstore,
    ),
    Role(
        "joiner",
        "The joiner: joins, registers, writes.",
        ("eventstore.client", "idregistry.client", "joiner.server"),
        _joiner,
    ),
    Role(
        "dispatcher",
        "The dispatcher: reads foreign events and keeps them until joined.",
        ("eventstore.client", "idregistry.client", "joiner.client", "dispatcher.server"),
        _dispatcher,
    ),
)
ROLES: Final = {role.name: role for role in _ROWS}
"""In the order in which they are started, as in the settings (PIPELINE_ROLES): elections take longest."""
