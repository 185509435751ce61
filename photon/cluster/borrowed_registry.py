"""The registry for a command that needs its answers: the one that runs, or that of a run which has ended.

The replicas of `photon join` end with it. A command that asks them something then starts them on their
directories, for as long as it needs them, and holds the run's lock, so that no run begins beside it.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from photon.cluster.console import RunDisplay
from photon.cluster.ports import free_ports, on_free_ports
from photon.cluster.registry_members import members_of
from photon.cluster.registry_named import Named, registry_of
from photon.cluster.supervisor import Supervisor
from photon.cluster.topology import Replica, Topology, process_name, read_topology, write_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, UnavailableError, UsageError

if TYPE_CHECKING:
    from idregistry.client import RegistryAt

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
def asked_registry(named: Named) -> Iterator[Asked]:
    """Valid within the block.

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
            yield Asked(held.enter_context(_started(work, topology)), started=True)


def _borrowing(work: Path) -> DirectoryLock:
    try:
        return DirectoryLock(work / "borrowed")
    except LockedError as error:
        raise LockedError(
            f"{work}: another command has started the registry of this run for itself; wait until it is done"
        ) from error


@contextmanager
def _started(work: Path, topology: Topology) -> Iterator["RegistryAt"]:
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
        yield on_free_ports(start, RunDisplay().notice)
    finally:
        supervisor.stop([list(supervisor.children)])
        path.unlink(missing_ok=True)


def _placed(names: Sequence[str], work: Path, topology: Topology) -> Topology:
    """The replicas of these names on free ports, and a secret of their own."""
    ports = free_ports(2 * len(names), random.Random())
    replicas = [
        Replica(name, f"127.0.0.1:{grpc}", "127.0.0.1", raft, str(work.absolute() / "registry" / name))
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
