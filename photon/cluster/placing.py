"""Addresses and directories on this machine for the processes of a system; ports chosen free."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from photon.cluster.ports import free_ports
from photon.cluster.registry_members import Members
from photon.cluster.topology import Pipeline, Replica, Topology
from photon.core.settings import Settings


class Placing:
    """Gives each process its place under `work`. UnavailableError if there are too few free ports."""

    def __init__(
        self, settings: Settings, replicas: int, pipelines: int, work: Path, rng: random.Random
    ) -> None:
        self._settings = settings
        self._work = work.absolute()
        of_a_pipeline = (
            settings.eventstore.processes + settings.joiner.processes + settings.dispatcher.workers
        )
        processes = replicas + pipelines * of_a_pipeline
        needed = replicas + processes * (2 if settings.metrics.serve else 1)
        self._ports: Iterator[int] = iter(free_ports(needed, rng))

    def replicas(self, members: Members, datacenters: Mapping[str, str]) -> list[Replica]:
        """`datacenters`: replica -> where it is, of those that are anywhere in particular."""
        return [
            Replica(
                name=name,
                grpc=self._address(),
                raft_host="127.0.0.1",
                raft_port=next(self._ports),
                directory=str(self._work / "registry" / name),
                joining=name in members.joining,
                datacenter=datacenters.get(name, ""),
            )
            for name in members.names
        ]

    def pipelines(self, names: Sequence[str]) -> list[Pipeline]:
        return [
            Pipeline(
                datacenter=name,
                eventstores=self._addresses(self._settings.eventstore.processes),
                joiners=self._addresses(self._settings.joiner.processes),
                dispatchers=self._addresses(self._settings.dispatcher.workers),
                directory=str(self._work / name),
            )
            for name in names
        ]

    def metrics(self, topology: Topology) -> None:
        """An address more for each process, where metrics are served."""
        if self._settings.metrics.serve:
            topology.metrics.update({process: self._address() for process in topology.processes()})

    def _addresses(self, count: int) -> list[str]:
        return [self._address() for _ in range(count)]

    def _address(self) -> str:
        return f"127.0.0.1:{next(self._ports)}"
