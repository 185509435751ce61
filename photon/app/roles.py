"""One process of a topology: its parts made from the settings, served until SIGTERM.

Exit status 2 for settings and addresses that can't be used, 3 for state that can't be trusted (a restart
mends neither), 1 for anything else (a restart may).
"""

import contextlib
import logging
import os
import random
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from photon.app.supervisor import CORRUPT_STATUS, die_with_parent
from photon.app.topology import Topology, read_topology
from photon.core.clock import Clock, SystemClock
from photon.core.errors import CorruptStateError, PhotonError, UsageError
from photon.core.settings import Settings
from photon.core.settings import Tls as TlsFiles
from photon.core.tls import Tls, load_tls
from photon.wire.rpc import on_termination

if TYPE_CHECKING:
    from idregistry.client import RegistryClient


class _Role(Protocol):
    def start(self) -> None: ...

    def stop(self) -> object: ...


def serve_role(role: str, topology_path: Path, name: str) -> None:
    """Run one role until it is told to stop. PhotonError for what keeps it from starting."""
    die_with_parent()
    _raise_descriptor_limit()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    topology = read_topology(topology_path)
    failure: list[BaseException] = []
    told = threading.Event()

    def fail(error: BaseException) -> None:
        failure.append(error)
        told.set()

    try:
        server = _MAKERS[role](topology, name, SystemClock(), fail)
        on_termination(told.set)
        server.start()
    except CorruptStateError as error:
        _end(error, CORRUPT_STATUS)
    told.wait()
    if failure:
        # The room can't go on; what it still holds is on disk or was never acknowledged.
        _end(failure[0], _status_after(failure[0]))
    server.stop()


def _status_after(error: BaseException) -> int:
    """The exit status after a failure at work. A replica that was replaced, say, never comes back."""
    if isinstance(error, CorruptStateError):
        return CORRUPT_STATUS
    return error.exit_status if isinstance(error, UsageError) else 1


def _raise_descriptor_limit() -> None:
    """As many files and sockets as the system allows: a registry replica has some for each of its shards."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" may be more than the kernel's own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _end(error: BaseException, status: int) -> None:
    if not isinstance(error, PhotonError):
        logging.getLogger("photon").critical("unexpected", exc_info=error)
    sys.stderr.write(f"photon: {error or type(error).__name__}\n")
    sys.stderr.flush()
    os._exit(status)


def _registry(topology: Topology, name: str, clock: Clock, fail: Callable[[BaseException], None]) -> _Role:
    from idregistry.server import RegistryServer

    me = topology.replica(name)
    settings = topology.checked_settings()
    return RegistryServer(
        settings.registry,
        node=me.name,
        listen=me.grpc,
        raft_listen=(me.raft_host, me.raft_port),
        peers={r.name: (r.raft_host, r.raft_port) for r in topology.replicas if r.name != me.name},
        addresses={r.name: r.grpc for r in topology.replicas},
        directory=Path(me.directory),
        secret=bytes.fromhex(topology.secret),
        clock=clock,
        rng=random.Random(),
        on_fatal=fail,
        joining=me.joining,
        tls=_tls(settings.tls),
    )


def _tls(settings: TlsFiles) -> Tls | None:
    """SettingsError for files that can't be used."""
    if not settings.cert:
        return None
    return load_tls(Path(settings.cert), Path(settings.key), Path(settings.ca))


def _eventstore(topology: Topology, name: str, clock: Clock, fail: Callable[[BaseException], None]) -> _Role:
    from eventstore.server import EventStoreServer

    pipeline = topology.pipeline(name)
    return EventStoreServer(
        topology.checked_settings(),
        listen=pipeline.eventstore,
        directory=Path(pipeline.directory) / "eventstore",
        patterns=topology.primary,
        dead_letters=topology.dead_letters_directory(name),
        clock=clock,
        drain=topology.drain,
        on_fatal=fail,
    )


def _joiner(topology: Topology, name: str, clock: Clock, fail: Callable[[BaseException], None]) -> _Role:
    from eventstore.client import EventStoreClient
    from joiner.server import JoinerServer

    settings = topology.checked_settings()
    pipeline = topology.pipeline(name)
    return JoinerServer(
        settings,
        name=f"joiner-{name}",
        datacenter=name,
        listen=pipeline.joiner,
        directory=Path(pipeline.directory) / "joiner",
        output_root=Path(topology.output),
        registry=_registry_client(topology, settings, clock),
        eventstore=EventStoreClient(pipeline.eventstore, settings.eventstore.request_timeout_s),
        clock=clock,
        rng=random.Random(),
        drain=topology.drain,
        on_fatal=fail,
    )


def _dispatcher(topology: Topology, name: str, clock: Clock, fail: Callable[[BaseException], None]) -> _Role:
    from dispatcher.server import DispatcherServer
    from joiner.client import JoinerClient

    settings = topology.checked_settings()
    pipeline = topology.pipeline(name)
    server = DispatcherServer(
        settings,
        name=f"dispatcher-{name}",
        datacenter=name,
        listen=pipeline.dispatcher,
        directory=Path(pipeline.directory) / "dispatcher",
        patterns=topology.foreign,
        dead_letters=topology.dead_letters_directory(name),
        registry=_registry_client(topology, settings, clock),
        joiner=JoinerClient([pipeline.joiner], settings.dispatcher.request_timeout_s),
        clock=clock,
        rng=random.Random(),
        drain=topology.drain,
    )
    return _Watched(server.start, server.stop, server.wait, fail)


class _Watched:
    """A role that runs by itself and may end by itself: its failure is the process's."""

    def __init__(
        self,
        start: Callable[[], None],
        stop: Callable[[], object],
        wait: Callable[[], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._start, self.stop, self._wait, self._fail = start, stop, wait, fail

    def start(self) -> None:
        self._start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self._fail(error)


def _registry_client(topology: Topology, settings: Settings, clock: Clock) -> "RegistryClient":
    from idregistry.client import RegistryClient

    return RegistryClient(
        [replica.grpc for replica in topology.replicas],
        settings.registry.request_timeout_s,
        clock,
        random.Random(),
    )


_MAKERS: Final = {
    "registry": _registry,
    "eventstore": _eventstore,
    "joiner": _joiner,
    "dispatcher": _dispatcher,
}
