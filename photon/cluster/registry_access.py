"""Which registry a command means: that of a run here, the one at some addresses, or that of the settings.

The replicas of `photon join` end with it. A command that asks them something then starts them on their
directories, for as long as it needs them, and holds the run's lock, so that no run begins beside it.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from photon.cluster.local_cluster import LocalCluster, on_free_ports, placed
from photon.cluster.registry_replicas import members_of
from photon.cluster.supervisor import FreshLauncher
from photon.cluster.topology import Topology, read_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, UnavailableError, UsageError
from photon.core.settings import Metrics, Settings
from photon.rpc.network import network_of

if TYPE_CHECKING:
    from idregistry.client import RegistryAt, RegistryClient

START_S_MAX: Final = 60.0
_POLL_S: Final = 0.05
_ASK_S: Final = 2.0
_TOPOLOGY: Final = "topology-registry.json"
RESUME: Final = "the command that began it resumes it"
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
        """UsageError; UnavailableError for a run that has ended; SettingsError for TLS files that can't be
        used."""
        from idregistry.client import RegistryAt

        self.check()
        if self.work is not None:
            return registry_of(running_topology(self.work))
        known = tuple(replica.grpc for replica in self.settings.replicas.values())
        if self.addresses is not None:
            known = tuple(address for address in self.addresses.split(",") if address)
        if not known:
            raise UsageError("--registry names no address; give HOST:PORT,...")
        return RegistryAt(known, network_of(self.settings))


def has_ended(work: Path) -> bool:
    """Whether no run is on in it, nor a command that has started the run's registry for itself."""
    try:
        DirectoryLock(work).release()
    except LockedError:
        return False
    return True


def running_topology(work: Path) -> Topology:
    """UnavailableError if the run has ended; UsageError if there was none."""
    topology = read_topology(work / "topology.json")
    if has_ended(work):
        raise UnavailableError(f"{work}: the run has ended, and its registry with it; {RESUME}")
    return topology


def notice(text: str) -> None:
    """A line for the person, on stderr."""
    click.echo(f"photon: {text}", err=True)


def registry_of(topology: Topology) -> "RegistryAt":
    """The topology's. SettingsError for TLS files that can't be used."""
    from idregistry.client import RegistryAt

    return RegistryAt(tuple(replica.grpc for replica in topology.replicas), topology.network(""))


@contextmanager
def asking(registry: "RegistryAt", timeout_s: float) -> Iterator["RegistryClient"]:
    """A client for the block. Who is waited for is told on stderr before a call waits out its time."""
    waits_for = ""
    with registry.client(_ASK_S) as client:
        try:
            if not client.directory().led:
                waits_for = "the registry has no leader yet"
        except UnavailableError:
            waits_for = f"the registry does not answer yet ({', '.join(registry.addresses)})"
    if waits_for:
        notice(f"{waits_for}; asking it for up to {timeout_s:g} s")
    with registry.client(timeout_s) as client:
        yield client


@dataclass(frozen=True, slots=True)
class Asked:
    """A registry to ask, and whether it was started for that: then its run has ended, and leases count from
    that start on."""

    registry: "RegistryAt"
    started: bool = False


@contextmanager
def asked_registry(named: Named) -> Iterator[Asked]:
    """Valid within the block. What takes longer than it should is told on stderr.

    UsageError if it is not named, or by no work directory; LockedError while another command has borrowed it;
    UnavailableError if the registry can't be started, or has no quorum.
    """
    named.check()
    if (work := named.work) is None:
        yield Asked(named.at())
        return
    topology = read_topology(work / "topology.json")
    with contextlib.ExitStack() as held:
        try:
            borrowing = held.enter_context(DirectoryLock(work / "borrowed"))
        except LockedError as error:
            raise LockedError(
                f"{work}: another command has started the registry of this run for itself; "
                "wait until it is done"
            ) from error
        try:
            held.enter_context(DirectoryLock(work))
        except LockedError:  # a run is on: its registry it is
            borrowing.release()
            yield Asked(registry_of(topology))
        else:
            yield Asked(held.enter_context(_started(work, topology)), started=True)


@contextmanager
def _started(work: Path, topology: Topology) -> Iterator["RegistryAt"]:
    members = members_of(work, len(topology.replicas))
    if members.mostly_lost:
        raise UsageError(f"{work / 'registry'}: no registry, or most of it is lost; `photon join` says more")
    standing = replace(members, names=[name for name in members.names if name not in members.joining])
    alone = replace(
        topology, secret=secrets.token_hex(32), settings=replace(topology.settings, metrics=Metrics())
    )

    def start() -> LocalCluster:
        here = placed(alone, standing, {}, (), work, random.Random())
        cluster = LocalCluster(here, work, FreshLauncher(), _TOPOLOGY)
        try:
            cluster.start()
            _await_leaders(cluster)
        except BaseException:
            cluster.kill()
            raise
        return cluster

    try:
        cluster = on_free_ports(start, notice)
        try:
            yield registry_of(cluster.topology)
        finally:
            cluster.stop()
    finally:
        (work / _TOPOLOGY).unlink(missing_ok=True)


def _await_leaders(cluster: LocalCluster) -> None:
    """Return when every shard has a leader. UnavailableError, ProcessFailedError."""
    deadline = time.monotonic() + START_S_MAX
    with registry_of(cluster.topology).client(_ASK_S) as client:
        while time.monotonic() < deadline:
            cluster.poll()
            with contextlib.suppress(UnavailableError):
                directory = client.directory()
                if directory.led and directory.leaders and all(directory.leaders):
                    return
            time.sleep(_POLL_S)
    raise UnavailableError(
        f"the registry was started and has no leader after {START_S_MAX:g} s; see its logs in the work "
        "directory"
    )
