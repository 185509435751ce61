"""Which registry a command means: that of a run here, the one at some addresses, or that of the settings.

The replicas of `photon join` end with it. A command that asks them something then starts them on their
directories, for as long as it needs them, and holds the run's lock, so that no run begins beside it.
"""

import contextlib
import functools
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from photon.cluster.placing import free_ports, on_free_ports
from photon.cluster.registry_replicas import members_of
from photon.cluster.roles import process_name
from photon.cluster.supervisor import Supervisor
from photon.cluster.topology import Replica, Topology, read_topology, write_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, UnavailableError, UsageError
from photon.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from idregistry.client import RegistryAt

_Result = TypeVar("_Result")

_WHICH: Final = (
    "say which registry: either --work DIR or --registry HOST:PORT,..., or a --config that names [replicas]"
)


@dataclass(frozen=True, slots=True)
class Named:
    """`work`: a run's work directory. `addresses`: comma-separated; else the [replicas] of `settings`, whose
    [tls] goes for both. Of a run it is its own that counts."""

    work: Path | None = None
    addresses: str | None = None
    settings: Settings = field(default_factory=Settings)

    def check(self) -> None:
        """UsageError if it names none, or two."""
        given = (self.work is not None) + (self.addresses is not None)
        if given > 1 or not (given or self.settings.replicas):
            raise UsageError(_WHICH)

    def at(self) -> "RegistryAt":
        """UsageError; SettingsError for TLS files that can't be used."""
        from idregistry.client import RegistryAt
        from photon.cluster.topology import network_of, read_topology

        self.check()
        if self.work is not None:
            return registry_of(read_topology(self.work / "topology.json"))
        if self.addresses is None:
            known = tuple(replica.grpc for replica in self.settings.replicas.values())
        else:
            known = tuple(address for address in self.addresses.split(",") if address)
        if not known:
            raise UsageError("--registry names no address; give HOST:PORT,...")
        return RegistryAt(known, network_of(self.settings, ""))


def registry_of(topology: Topology) -> "RegistryAt":
    """The topology's. SettingsError for TLS files that can't be used."""
    from idregistry.client import RegistryAt

    return RegistryAt(tuple(replica.grpc for replica in topology.replicas), topology.network(""))


def registry_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorator of a click command: --work, --registry and --config become one argument, `named`."""

    @click.option(
        "--work",
        type=click.Path(path_type=Path),
        help="Work directory of the run (OUT/.photon).",
    )
    @click.option("--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas.")
    @click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="Settings (photon.toml): [replicas] that are asked without --registry, [tls] to ask them with.",
    )
    @functools.wraps(command)
    def with_options(
        *arguments: Any, work: Path | None, addresses: str | None, config: Path | None, **others: Any
    ) -> _Result:
        if work is not None and config is not None:
            raise UsageError("--work has the settings of its run; leave --config out")
        named = Named(work, addresses, load_settings(config))
        named.check()
        return command(*arguments, named=named, **others)

    return with_options


START_S_MAX: Final = 60.0
_POLL_S: Final = 0.05
_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A registry to ask, and whether it was started for that: then its run has ended, and leases count from
    that start on."""

    registry: "RegistryAt"
    started: bool = False


@contextmanager
def asked_registry(named: Named, notice: Callable[[str], None]) -> Iterator[Asked]:
    """Valid within the block. `notice` is told of what takes longer than it should.

    UsageError if it is not named, or by no work directory; LockedError while another command has borrowed it;
    UnavailableError if the registry can't be started, or has no quorum.
    """
    named.check()
    if (work := named.work) is None:
        yield Asked(named.at())
        return
    topology = read_topology(work / "topology.json")
    with contextlib.ExitStack() as held:
        borrowing = held.enter_context(_borrowing(work))
        try:
            held.enter_context(DirectoryLock(work))
        except LockedError:  # a run is on: its registry it is
            borrowing.release()
            yield Asked(registry_of(topology))
        else:
            yield Asked(held.enter_context(_started(work, topology, notice)), started=True)


def _borrowing(work: Path) -> DirectoryLock:
    try:
        return DirectoryLock(work / "borrowed")
    except LockedError as error:
        raise LockedError(
            f"{work}: another command has started the registry of this run for itself; wait until it is done"
        ) from error


@contextmanager
def _started(work: Path, topology: Topology, notice: Callable[[str], None]) -> Iterator["RegistryAt"]:
    members = members_of(work, len(topology.replicas))
    if members.mostly_lost:
        raise UsageError(f"{work / 'registry'}: no registry, or most of it is lost; `photon join` says more")
    names = [name for name in members.names if name not in members.joining]
    path = work / "topology-registry.json"
    supervisor = Supervisor(work / "logs")

    def start() -> "RegistryAt":
        supervisor.stop([list(supervisor.children)])  # those of a try before
        here = _placed(names, work, topology)
        write_topology(here, path)
        for name in names:
            supervisor.start(
                process_name("registry", name), ["registry", "serve", "--name", name, "--topology", str(path)]
            )
        registry = registry_of(here)
        _await_leaders(supervisor, registry)
        return registry

    try:
        yield on_free_ports(start, notice)
    finally:
        supervisor.stop([list(supervisor.children)])
        path.unlink(missing_ok=True)


def _placed(names: Sequence[str], work: Path, topology: Topology) -> Topology:
    """The replicas of these names on free ports, and a secret of their own."""
    ports = free_ports(2 * len(names), random.Random())
    replicas = [
        Replica(
            name=name,
            datacenter="",
            grpc=f"127.0.0.1:{grpc}",
            raft=f"127.0.0.1:{raft}",
            directory=str(work.absolute() / "registry" / name),
        )
        for name, grpc, raft in zip(names, ports[::2], ports[1::2], strict=True)
    ]
    return replace(topology, replicas=replicas, secret=secrets.token_hex(32), metrics={})


def _await_leaders(supervisor: Supervisor, registry: "RegistryAt") -> None:
    """Return when every shard has a leader. UnavailableError, ProcessFailedError."""
    deadline = time.monotonic() + START_S_MAX
    with registry.client(_ASK_S) as client:
        while time.monotonic() < deadline:
            supervisor.poll()
            with contextlib.suppress(UnavailableError):
                directory = client.directory()
                if directory.led and directory.leaders and all(directory.leaders):
                    return
            time.sleep(_POLL_S)
    raise UnavailableError(
        f"the registry was started and has no leader after {START_S_MAX:g} s; see its logs in the work "
        "directory"
    )
