"""The processes of a topology on this machine: planned with free ports, started, watched over, stopped."""

import random
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from photon.cluster.completion import grace_s, unlisted_files
from photon.cluster.placing import Placing
from photon.cluster.registry_replicas import DiskWatch, members_of
from photon.cluster.roles import ROLES
from photon.cluster.supervisor import Launcher, Supervisor
from photon.cluster.topology import (
    DATACENTER_NAMES,
    Topology,
    absolute,
    with_absolute_paths,
    write_topology,
)
from photon.core.settings import Settings


@dataclass(frozen=True, slots=True)
class JoinJob:
    """What `photon join` was asked for."""

    primary: list[str]
    foreign: list[str]
    out: Path
    config: Path | None
    work: Path
    datacenters: int = 1
    follow: bool = False


class LocalCluster:
    """All processes of a topology under one supervisor."""

    def __init__(self, topology: Topology, work: Path, launcher: Launcher) -> None:
        self.topology = topology
        self._path = work / "topology.json"
        write_topology(topology, self._path)
        self.supervisor = Supervisor(work / "logs", launcher)
        self._disks = DiskWatch(work / "registry", [replica.name for replica in topology.replicas])

    def start(self) -> None:
        """Everything at once but the dispatchers: each waits for whom it needs."""
        self._start(reads_on=False)

    def poll(self) -> None:
        """Restart what died, tell who lost its disk. ProcessFailedError, CorruptStateError: it is over."""
        self.supervisor.notices += self._disks.look()
        self.supervisor.poll()

    def start_dispatchers(self) -> None:
        self._start(reads_on=True)

    def stop(self) -> None:
        """Down the stream, so that nobody loses whom it still needs."""
        for tier in sorted({role.stops for role in ROLES.values()}):
            roles = [role for role in ROLES.values() if role.stops == tier]
            names = self.topology.titles(*(role.name for role in roles))
            if any(role.completes_files for role in roles):
                self.supervisor.stop([names], grace_s(unlisted_files(self.topology)))
            else:
                self.supervisor.stop([names])

    def kill(self) -> None:
        self.supervisor.kill()

    def _start(self, *, reads_on: bool) -> None:
        for role in ROLES.values():
            if role.reads_on != reads_on:
                continue
            for process in self.topology.processes(role.name):
                # The name first: `ps` may cut a long path off.
                arguments = [role.name, "serve", "--name", process.name, "--topology", str(self._path)]
                lost_disk = None if role.places else partial(self._disks.has_lost, process.name)
                self.supervisor.start(process.title, arguments, lost_disk)


def plan(job: JoinJob, settings: Settings, rng: random.Random) -> Topology:
    """Addresses and directories for every process, ports chosen free. UnavailableError if there are none."""
    names = DATACENTER_NAMES[: job.datacenters]
    members = members_of(job.work, settings.registry.replicas)
    places = Placing(settings, len(members.names), len(names), job.work, rng)
    topology = Topology(
        settings=with_absolute_paths(settings),
        primary=[absolute(pattern) for pattern in job.primary],
        foreign=[absolute(pattern) for pattern in job.foreign],
        output=str(job.out.absolute()),
        secret=secrets.token_hex(32),
        drain=not job.follow,
        replicas=places.replicas(members, {}),
        pipelines=places.pipelines(names),
    )
    places.metrics(topology)
    return topology
