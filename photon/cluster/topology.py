"""Who runs where: the addresses and directories of every process of one system, handed to each as a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from photon.cluster.roles import ROLES, process_name
from photon.core.addresses import split
from photon.core.disk import storage_errors, write_file
from photon.core.errors import UsageError
from photon.core.settings import DatacenterPlace, ReplicaPlace, Settings, parse_settings
from photon.rpc.network import Network, load_tls

_Item = TypeVar("_Item")

DATACENTER_NAMES: Final = ("east", "west", "central", "north", "south")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(ReplicaPlace):
    """One registry process, in its place: it hosts a replica of every shard."""

    name: str
    directory: str
    joining: bool = False
    """It founds nothing, but waits until `photon registry replace` gives it a place."""

    @property
    def raft_address(self) -> tuple[str, int]:
        return split(self.raft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(DatacenterPlace):
    """The processes of one datacenter (paper, Fig. 5). Without patterns of its own it reads the topology's.

    Of the event stores the first reads the logs and keeps the map; the others hold shares of the cache.
    """

    datacenter: str
    directory: str

    def addresses(self, role: str) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self, ROLES[role].places)
        return found


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
        shared = self.number == 0 or ROLES[role].shares_directory
        return Path(self.pipeline.directory) / (role if shared else f"{role}-{self.number}")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of any role: `name` as `--name` has it, `title` as statuses, logs and metrics have it."""

    role: str
    name: str
    address: str
    datacenter: str
    listen: str = ""
    """What it binds, if that is another address."""

    @property
    def title(self) -> str:
        return process_name(self.role, self.name)


@dataclass(frozen=True, slots=True)
class Topology:
    """One system. `drain`: the logs grow no more. `secret` (hex) authenticates the replicas to each other."""

    settings: Settings
    primary: list[str]
    foreign: list[str]
    output: str
    secret: str
    drain: bool
    replicas: list[Replica]
    pipelines: list[Pipeline]
    metrics: dict[str, str] = field(default_factory=dict)
    """Process (`joiner-east`) -> where it answers Prometheus."""
    regions: dict[str, str] = field(default_factory=dict)
    """Datacenter -> region."""

    def network(self, datacenter: str) -> Network:
        """As a process in the datacenter sees it. SettingsError for TLS files that can't be used."""
        return network_of(self.settings, datacenter)

    def nearest_first(self, datacenter: str) -> list[Replica]:
        """The replicas as a client in the datacenter asks them: its own, its region's, the others."""
        region = self.regions.get(datacenter)

        def distance(replica: Replica) -> int:
            if replica.datacenter == datacenter:
                return 0
            return 1 if region is not None and self.regions.get(replica.datacenter) == region else 2

        return sorted(self.replicas, key=distance)

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

    def processes(self, *roles: str) -> list[Process]:
        """All of these roles, or of every one, in the order in which they are started."""
        return [process for role in ROLES if not roles or role in roles for process in self._of(role)]

    def titles(self, *roles: str) -> list[str]:
        return [process.title for process in self.processes(*roles)]

    def process(self, role: str, name: str) -> Process:
        """UsageError if there is none."""
        kind = role if ROLES[role].places else f"{role} replica"
        found = self._of(role)
        return _named(found, [process.name for process in found], name, kind)

    def _of(self, role: str) -> list[Process]:
        if not ROLES[role].places:
            return [Process(role, r.name, r.grpc, r.datacenter, r.listen_grpc) for r in self.replicas]
        return [
            Process(role, place.name, place.address(role), place.pipeline.datacenter)
            for place in self.places(role)
        ]

    def primary_of(self, pipeline: Pipeline) -> list[str]:
        return list(pipeline.primary) or self.primary

    def foreign_of(self, pipeline: Pipeline) -> list[str]:
        return list(pipeline.foreign) or self.foreign

    def dead_letters_directory(self, datacenter: str) -> Path:
        return Path(self.output) / "dead-letters" / datacenter


def _named(items: Sequence[_Item], names: Sequence[str], name: str, what: str) -> _Item:
    if name not in names:
        raise UsageError(f"no {what} '{name}' in the topology; there are: {', '.join(names)}")
    return items[names.index(name)]


def with_absolute_paths(settings: Settings) -> Settings:
    """As a topology has them, which is read in other directories too."""
    joiner, tls = settings.joiner, settings.tls
    files = {name: absolute(file) for name in ("cert", "key", "ca") if (file := getattr(tls, name))}
    return replace(
        settings,
        joiner=replace(joiner, output_roots=tuple(absolute(root) for root in joiner.output_roots)),
        tls=replace(tls, **files),
    )


def absolute(path: str) -> str:
    """Also of a pattern; `..` and links stay as they are."""
    return str(Path.cwd() / path)


def network_of(settings: Settings, datacenter: str) -> Network:
    """As a process in the datacenter sees it. SettingsError for TLS files that can't be used."""
    files, own = settings.tls, settings.network
    tls = None
    if files.cert:
        # Absolute: a network may be sent to processes that run elsewhere.
        cert, key, ca = (Path(file).absolute() for file in (files.cert, files.key, files.ca))
        tls = load_tls(cert, key, ca, files.name)
    return Network(tls, settings.via.get(datacenter, {}), own.bind, own.insecure_beyond_loopback)


JOINER_FILES: Final = process_name("joiner", "")
"""How the names of the joined logs of all joiners begin."""


def write_topology(topology: Topology, path: Path) -> None:
    """For the owner's eyes only: it holds the secret."""
    with storage_errors(path):
        write_file(path, msgspec.json.format(msgspec.json.encode(topology), indent=2))


def read_topology(path: Path) -> Topology:
    """UsageError if there is none or it is no topology; SettingsError for its settings."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        settings = parse_settings(document.pop("settings", {}), "topology")
        return replace(msgspec.convert({**document, "settings": {}}, Topology), settings=settings)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); `photon join` writes one") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not a topology: {error}") from error
