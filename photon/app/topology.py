"""Who runs where: the addresses and directories of every process of one system, handed to each as a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from photon.core.disk import storage_errors, write_file
from photon.core.errors import UsageError
from photon.core.settings import Settings, parse_settings

_Item = TypeVar("_Item")

DATACENTER_NAMES: Final = ("east", "west", "central", "north", "south")


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
    """The processes of one datacenter (paper, Fig. 5)."""

    datacenter: str
    eventstore: str
    joiner: str
    dispatcher: str
    directory: str


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

    def checked_settings(self) -> Settings:
        return parse_settings(self.settings, "topology")

    def replica(self, name: str) -> Replica:
        return _named(self.replicas, [r.name for r in self.replicas], name, "registry replica")

    def pipeline(self, datacenter: str) -> Pipeline:
        return _named(self.pipelines, [p.datacenter for p in self.pipelines], datacenter, "datacenter")

    def dead_letters_directory(self, datacenter: str) -> Path:
        return Path(self.output) / "dead-letters" / datacenter


def _named(items: list[_Item], names: list[str], name: str, what: str) -> _Item:
    if name not in names:
        raise UsageError(f"no {what} '{name}' in the topology; there are: {', '.join(names)}")
    return items[names.index(name)]


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
