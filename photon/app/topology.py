"""Who runs where: the addresses and directories of every process of one system, handed to each as a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from photon.core.disk import storage_errors, write_file
from photon.core.errors import UsageError
from photon.core.settings import Settings, parse_settings

_Item = TypeVar("_Item")

DATACENTER_NAMES: Final = ("east", "west", "central", "north", "south")
PIPELINE_ROLES: Final = ("eventstore", "joiner", "dispatcher")


@dataclass(frozen=True, slots=True)
class Replica:
    """One registry process: it hosts a replica of every shard."""

    name: str
    grpc: str
    raft_host: str
    raft_port: int
    directory: str
    joining: bool = False
    """It founds nothing, but waits until `photon registry replace` gives it a place."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The processes of one datacenter (paper, Fig. 5): the addresses of each role's.

    Of the event stores the first reads the logs and keeps the map; the others hold shares of the cache.
    """

    datacenter: str
    eventstores: list[str]
    joiners: list[str]
    dispatchers: list[str]
    directory: str

    def addresses(self, role: str) -> list[str]:
        return {"eventstore": self.eventstores, "joiner": self.joiners, "dispatcher": self.dispatchers}[role]


@dataclass(frozen=True, slots=True)
class Place:
    """One of the like processes of a role in a datacenter, from 0 on."""

    pipeline: Pipeline
    number: int

    @property
    def name(self) -> str:
        """As `--name` has it: `east` for the first, `east/1` for the second."""
        datacenter = self.pipeline.datacenter
        return f"{datacenter}/{self.number}" if self.number else datacenter

    def process(self, role: str) -> str:
        """`joiner-east`, `joiner-east-1`."""
        return process_name(role, self.name)

    def address(self, role: str) -> str:
        return self.pipeline.addresses(role)[self.number]

    def directory(self, role: str) -> Path:
        """Dispatchers share one; each joiner has its own, an event store beside the first keeps nothing."""
        shared = self.number == 0 or role == "dispatcher"
        return Path(self.pipeline.directory) / (role if shared else f"{role}-{self.number}")


def process_name(role: str, name: str) -> str:
    """What a process is called in statuses, logs and metrics."""
    return f"{role}-{name.replace('/', '-')}"


@dataclass(frozen=True, slots=True)
class Topology:
    """One system. `drain`: the logs grow no more. `secret` (hex) authenticates the replicas to each other."""

    settings: dict[str, Any]
    primary: list[str]
    foreign: list[str]
    output: str
    secret: str
    drain: bool
    replicas: list[Replica]
    pipelines: list[Pipeline]
    metrics: dict[str, str] = field(default_factory=dict)
    """Process (`joiner-east`) -> where it answers Prometheus."""

    def checked_settings(self) -> Settings:
        return parse_settings(self.settings, "topology")

    def replica(self, name: str) -> Replica:
        return _named(self.replicas, [r.name for r in self.replicas], name, "registry replica")

    def pipeline(self, datacenter: str) -> Pipeline:
        return _named(self.pipelines, [p.datacenter for p in self.pipelines], datacenter, "datacenter")

    def place(self, role: str, name: str) -> Place:
        """UsageError if there is no such process."""
        places = self.places(role)
        return _named(places, [place.name for place in places], name, role)

    def places(self, role: str) -> list[Place]:
        """All processes of a role, datacenter by datacenter."""
        return [Place(p, number) for p in self.pipelines for number in range(len(p.addresses(role)))]

    def processes(self) -> list[str]:
        """The names of all."""
        replicas = [process_name("registry", replica.name) for replica in self.replicas]
        return replicas + [place.process(role) for role in PIPELINE_ROLES for place in self.places(role)]

    def dead_letters_directory(self, datacenter: str) -> Path:
        return Path(self.output) / "dead-letters" / datacenter


def _named(items: Sequence[_Item], names: Sequence[str], name: str, what: str) -> _Item:
    if name not in names:
        raise UsageError(f"no {what} '{name}' in the topology; there are: {', '.join(names)}")
    return items[names.index(name)]


JOINER_FILES: Final = process_name("joiner", "")
"""How the names of the joined logs of all joiners begin."""


def write_topology(topology: Topology, path: Path) -> None:
    """For the owner's eyes only: it holds the secret."""
    with storage_errors(path):
        write_file(path, msgspec.json.format(msgspec.json.encode(topology), indent=2))


def read_topology(path: Path) -> Topology:
    """UsageError if there is none or it is no topology."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Topology)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); `photon join` writes one") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not a topology: {error}") from error
