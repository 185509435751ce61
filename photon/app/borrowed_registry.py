"""The registry for a command that needs its answers: the one that runs, or that of a run which has ended.

The replicas of `photon join` end with it. A command that asks them something then starts them on their
directories, for as long as it needs them, and holds the run's lock, so that no run begins beside it.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from photon.app.ports import free_ports
from photon.app.registry_members import members_of
from photon.app.supervisor import Supervisor
from photon.app.topology import Replica, Topology, process_name, read_topology, write_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, UnavailableError, UsageError

START_S_MAX: Final = 60.0
_POLL_S: Final = 0.05
_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A registry to ask: gRPC addresses of its replicas, and whether it was started for that: then its run
    has ended, and leases count from that start on."""

    addresses: list[str]
    started: bool = False


@contextmanager
def registry_addresses(work: Path | None, addresses: str | None) -> Iterator[list[str]]:
    """The addresses of `asked_registry`, where nothing else matters."""
    with asked_registry(work, addresses) as registry:
        yield registry.addresses


@contextmanager
def asked_registry(work: Path | None, addresses: str | None) -> Iterator[Asked]:
    """Replicas, valid within the block. `addresses`: given by the user, comma-separated.

    UsageError if neither or both are given, or `work` is no work directory; LockedError while another command
    has borrowed it; UnavailableError if the registry can't be started, or has no quorum.
    """
    if (work is None) == (addresses is None):
        raise UsageError("say which registry: either --work DIR or --registry HOST:PORT,...")
    if work is None:
        known = [address for address in (addresses or "").split(",") if address]
        if not known:
            raise UsageError("--registry names no address; give HOST:PORT,...")
        yield Asked(known)
        return
    topology = read_topology(work / "topology.json")
    with contextlib.ExitStack() as held:
        borrowing = held.enter_context(_borrowing(work))
        try:
            held.enter_context(DirectoryLock(work))
        except LockedError:  # a run is on: its registry it is
            borrowing.release()
            yield Asked([replica.grpc for replica in topology.replicas])
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
def _started(work: Path, topology: Topology) -> Iterator[list[str]]:
    members = members_of(work, len(topology.replicas))
    if members.mostly_lost:
        raise UsageError(f"{work / 'registry'}: no registry, or most of it is lost; `photon join` says more")
    names = [name for name in members.names if name not in members.joining]
    ports = free_ports(2 * len(names), random.Random())
    replicas = [
        Replica(name, f"127.0.0.1:{grpc}", "127.0.0.1", raft, str(work.absolute() / "registry" / name))
        for name, grpc, raft in zip(names, ports[::2], ports[1::2], strict=True)
    ]
    path = work / "topology-registry.json"
    write_topology(replace(topology, replicas=replicas, secret=secrets.token_hex(32), metrics={}), path)
    supervisor = Supervisor(work / "logs")
    try:
        for name in names:
            supervisor.start(
                process_name("registry", name), ["registry", "serve", "--name", name, "--topology", str(path)]
            )
        addresses = [replica.grpc for replica in replicas]
        _await_leaders(supervisor, addresses)
        yield addresses
    finally:
        supervisor.stop([list(supervisor.children)])
        path.unlink(missing_ok=True)


def _await_leaders(supervisor: Supervisor, addresses: list[str]) -> None:
    """Return when every shard has a leader. UnavailableError, ProcessFailedError."""
    from idregistry.client import RegistryClient
    from photon.core.clock import SystemClock

    client = RegistryClient(addresses, _ASK_S, SystemClock(), random.Random())
    deadline = time.monotonic() + START_S_MAX
    try:
        while time.monotonic() < deadline:
            supervisor.poll()
            with contextlib.suppress(UnavailableError):
                directory = client.directory()
                if directory.led and directory.leaders and all(directory.leaders):
                    return
            time.sleep(_POLL_S)
    finally:
        client.close()
    raise UnavailableError(
        f"the registry was started and has no leader after {START_S_MAX:g} s; see its logs in the work "
        "directory"
    )
