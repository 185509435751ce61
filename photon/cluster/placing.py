"""Addresses and directories on this machine for the processes of a system; ports chosen free."""

import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from photon.cluster.registry_replicas import Members
from photon.cluster.roles import PIPELINE_ROLES, ROLES
from photon.cluster.supervisor import PortTakenError
from photon.cluster.topology import Pipeline, Replica, Topology
from photon.core.errors import UnavailableError
from photon.core.settings import Settings

PORT_TRIES_MAX: Final = 5
_Started = TypeVar("_Started")

# Below the range the kernel gives to outgoing connections, so that none of those takes a port
# between the choice and the bind, nor while a process restarts on it.
_LOW: Final = 20_000
_HIGH: Final = 32_000
_TRIES: Final = 2_000


def free_ports(count: int, rng: random.Random) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listens on now."""
    ports: set[int] = set()
    for _ in range(_TRIES):
        if len(ports) == count:
            break
        port = rng.randrange(_LOW, _HIGH)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.add(port)
    if len(ports) < count:
        raise UnavailableError(f"no {count} free ports between {_LOW} and {_HIGH} on 127.0.0.1; free some")
    return sorted(ports)


def on_free_ports(
    attempt: Callable[[], _Started], notice: Callable[[str], None], tries_max: int = PORT_TRIES_MAX
) -> _Started:
    """What `attempt` returns, which chooses ports; again, as long as another program is quicker.

    What was done is safe, as after any other end of a run. The last PortTakenError is raised.
    """
    for _ in range(tries_max - 1):
        try:
            return attempt()
        except PortTakenError as error:
            notice(f"{error}; starting again on other ports")
    return attempt()


class Placing:
    """Gives each process its place under `work`. UnavailableError if there are too few free ports."""

    def __init__(
        self, settings: Settings, replicas: int, pipelines: int, work: Path, rng: random.Random
    ) -> None:
        self._settings = settings
        self._work = work.absolute()
        of_a_pipeline = sum(ROLES[role].processes(settings) for role in PIPELINE_ROLES)
        processes = replicas + pipelines * of_a_pipeline
        needed = replicas + processes * (2 if settings.metrics.serve else 1)
        self._ports: Iterator[int] = iter(free_ports(needed, rng))

    def replicas(self, members: Members, datacenters: Mapping[str, str]) -> list[Replica]:
        """`datacenters`: replica -> where it is, of those that are anywhere in particular."""
        return [
            Replica(
                name=name,
                grpc=self._address(),
                raft=self._address(),
                directory=str(self._work / "registry" / name),
                joining=name in members.joining,
                datacenter=datacenters.get(name, ""),
            )
            for name in members.names
        ]

    def pipelines(self, names: Sequence[str]) -> list[Pipeline]:
        return [
            Pipeline(datacenter=name, directory=str(self._work / name), **self._processes()) for name in names
        ]

    def _processes(self) -> dict[str, Any]:
        """An address for each, by the keys of [datacenters.NAME]."""
        return {
            role.places: tuple(self._address() for _ in range(role.processes(self._settings)))
            for role in ROLES.values()
            if role.places
        }

    def metrics(self, topology: Topology) -> None:
        """An address more for each process, where metrics are served."""
        if self._settings.metrics.serve:
            topology.metrics.update({title: self._address() for title in topology.titles()})

    def _address(self) -> str:
        return f"127.0.0.1:{next(self._ports)}"
