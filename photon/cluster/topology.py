"""Who runs where: the addresses and directories of every process of one system.

`photon join` and `photon dev` plan a system and hand it to each process as a file; a system of several
machines is named by the photon.toml that all of them have. Either way it is a `Topology`.
"""

import dataclasses
import ipaddress
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from photon.connect.copies import copies_of, patterns_of
from photon.connect.importer import SIDES
from photon.connect.uris import is_known_source, is_source
from photon.core.addresses import joined, split, split_address
from photon.core.disk import storage_errors, write_file
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import (
    MAIN_SET,
    PIPELINE_ROLES,
    DatacenterPlace,
    ReplicaPlace,
    Settings,
    load_settings,
    parse_settings,
    reading_fingerprint,
)
from photon.rpc.network import Network, network_of

DATACENTER_NAMES: Final = ("east", "west", "central", "north", "south")
REGISTRY: Final = "registry"
SECRET_BYTES_MIN: Final = 16

_OWN_NAMES: Final = frozenset({"borrowed", "lock", "logs", "recovery", "registry", "run", "stdin"})
"""Files of a work directory and of the joined logs: the directories of a datacenter lie beside them."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_Item = TypeVar("_Item")


def process_name(role: str, name: str) -> str:
    """What a process is called in statuses, logs and metrics: `joiner-east`, `joiner-east-1`."""
    return f"{role}-{name.replace('/', '-')}"


JOINER_FILES: Final = process_name("joiner", "")
"""How the names of the joined logs of all joiners begin."""


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
    """The processes of a datacenter (paper, Fig. 5). Without patterns of its own it reads the topology's."""

    datacenter: str
    directory: str

    def addresses(self, role: str) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self, f"{role}s")
        return found

    def home(self, role: str, number: int = 0) -> Path:
        """Where a process keeps its state. Dispatchers of one machine's run share the first one's."""
        return Path(self.directory) / (f"{role}-{number}" if number else role)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of any role: `name` as `--name` has it, `title` as statuses, logs and metrics have it."""

    role: str
    name: str
    address: str
    datacenter: str
    number: int = 0
    """Among those of its role in the datacenter: `east` is the first, `east/1` the second."""
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
    run: str = ""
    """Of one on this machine, whose ports are another's when it has ended."""

    @property
    def datacenters(self) -> list[str]:
        """Those with a pipeline first."""
        names = [p.datacenter for p in self.pipelines] + [r.datacenter for r in self.replicas]
        return list(dict.fromkeys(filter(None, names)))

    def network(self, datacenter: str) -> Network:
        """As a process in the datacenter sees it. SettingsError for TLS files that can't be used."""
        return replace(network_of(self.settings, datacenter), run=self.run)

    def nearest_first(self, datacenter: str) -> list[Replica]:
        """The replicas as a client in the datacenter asks them: its own, its region's, the others."""
        region = self.regions.get(datacenter)

        def distance(replica: Replica) -> int:
            if replica.datacenter == datacenter:
                return 0
            return 1 if region is not None and self.regions.get(replica.datacenter) == region else 2

        return sorted(self.replicas, key=distance)

    def crowded(self) -> str | None:
        """What to warn of where the loss of one region would take the registry's majority with it."""
        if not self.regions:
            return None
        for name in sorted({replica.set for replica in self.replicas}):
            regions = [self.regions.get(one.datacenter) for one in self.replicas if one.set == name]
            region, count = Counter(regions).most_common(1)[0]
            if count > len(regions) // 2:
                return (
                    f"{count} of {len(regions)} registry replicas are in region {region}: if it is lost, "
                    "nothing can be registered anywhere; spread them over three regions ([replicas], "
                    "datacenters.NAME.region)"
                )
        return None

    def replica(self, name: str) -> Replica:
        return _named(self.replicas, [r.name for r in self.replicas], name, "registry replica")

    def pipeline(self, datacenter: str) -> Pipeline:
        return _named(self.pipelines, [p.datacenter for p in self.pipelines], datacenter, "datacenter")

    def processes(self, *roles: str) -> list[Process]:
        """All of these roles, or of every one, in the order in which they are started."""
        chosen = roles or (REGISTRY, *PIPELINE_ROLES)
        found = []
        if REGISTRY in chosen:
            found += [
                Process(REGISTRY, r.name, r.grpc, r.datacenter, listen=r.listen_grpc) for r in self.replicas
            ]
        return found + [
            Process(role, f"{p.datacenter}/{n}" if n else p.datacenter, address, p.datacenter, n)
            for role in PIPELINE_ROLES
            if role in chosen
            for p in self.pipelines
            for n, address in enumerate(p.addresses(role))
        ]

    def titles(self, *roles: str) -> list[str]:
        return [process.title for process in self.processes(*roles)]

    def process(self, role: str, name: str) -> Process:
        """UsageError if there is none."""
        kind = "registry replica" if role == REGISTRY else role
        found = self.processes(role)
        return _named(found, [process.name for process in found], name, kind)

    def patterns_of(self, pipeline: Pipeline, side: str) -> list[str]:
        """Patterns of its log files of a side, the copies of sources among them."""
        return patterns_of(pipeline.home("importer"), side, self._logs(pipeline, side))

    def shares_of(self, pipeline: Pipeline) -> int:
        """Into how many its foreign logs are shared: on one machine each dispatcher has one; elsewhere they
        move, and there may be more than dispatchers."""
        dispatchers = len(pipeline.dispatchers)
        return dispatchers if self.run else max(self.settings.dispatcher.workers, dispatchers)

    def logs_of(self, side: str, texts: Iterable[str]) -> tuple[str, ...]:
        """Log files' patterns as they are; of a source, its copies in the first datacenter that imports it.

        UsageError if none does.
        """
        found = []
        for text in texts:
            places = []
            if is_source(text):
                homes = [pipeline.home("importer") for pipeline in self.pipelines]
                names = {text, absolute(text)}  # of files the run knows these
                copies = [copies_of(home, side, name) for home in homes for name in names]
                places = [str(place / "*.jsonl") for place in copies if place.is_dir()]
            if not places and is_known_source(text):
                raise UsageError(f"{text}: no datacenter of this run that is on this machine imports it")
            found.append(next(iter(places), text))
        return tuple(found)

    def _logs(self, pipeline: Pipeline, side: str) -> list[str]:
        return list(getattr(pipeline, side) or getattr(self, side))

    def sources_of(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """Side -> what of it is imported; none where all is log files."""
        found = {side: list(filter(is_source, self._logs(pipeline, side))) for side in SIDES}
        return {side: uris for side, uris in found.items() if uris}

    @property
    def imports(self) -> bool:
        """Whether what all pipelines read has sources that are imported."""
        return any(map(is_source, (*self.primary, *self.foreign)))

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


def unplaced(
    settings: Settings, primary: Iterable[str], foreign: Iterable[str], out: Path, drain: bool
) -> Topology:
    """A system on this machine whose processes have no places yet (photon.cluster.local_cluster.placed)."""
    return Topology(
        settings=with_absolute_paths(settings),
        primary=[absolute(pattern) for pattern in primary],
        foreign=[absolute(pattern) for pattern in foreign],
        output=str(out.absolute()),
        secret=secrets.token_hex(32),
        drain=drain,
        replicas=[],
        pipelines=[],
    )


def absolute(path: str) -> str:
    """Also of a pattern; `..` and links stay as they are, and so does a URI."""
    return path if "://" in path else str(Path.cwd() / path)


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


def read_system(config: Path | None, topology: Path | None) -> Topology:
    """Of one of the two files. UsageError, SettingsError."""
    if (config is None) == (topology is None):
        raise UsageError("name one of --config (photon.toml) and --topology (topology.json)")
    if topology is not None:
        return read_topology(topology)
    return topology_of(load_settings(config), str(config))


def find_system(work: Path | None, config: Path | None) -> Topology:
    """UsageError unless one of the two is given, and it tells of a system."""
    if (work is None) == (config is None):
        raise UsageError("name the system by one of --work (of a run here) and --config (its photon.toml)")
    if work is not None:
        return read_topology(work / "topology.json")
    settings = load_settings(config)
    # Only replicas prove to each other that they have the secret; a command that asks need not read it.
    return topology_of(replace(settings, system=replace(settings.system, secret_file="")), str(config))


def settings_of(config: Path | None, run: Topology | None, work: Path | None) -> Settings:
    """Those of the run in `work`, where it is known, else the file's. SettingsError as load_alike."""
    if run is None or work is None:
        return load_settings(config)
    if config is not None:
        load_alike(config, run.settings, work)
    return run.settings


def load_alike(config: Path, runs: Settings, work: Path) -> Settings:
    """The settings of the file. SettingsError where they read events otherwise than those of the run in
    `work`: the events would be taken for other ones, and joined twice."""
    settings = load_settings(config)
    if reading_fingerprint(settings) != reading_fingerprint(runs):
        raise SettingsError(
            f"{config}: [foreign], [primary], ids.key and logs.line_bytes_max must be those of the run in "
            f"{work}, or events would be joined twice; leave --config out to use them"
        )
    return settings


def topology_of(settings: Settings, source: str = "settings") -> Topology:
    """The system that [replicas] and [datacenters] name. SettingsError, which begins with the `source`."""
    try:
        _check(settings)
        own = settings.system
        work = Path(own.work).absolute()
        topology = Topology(
            settings=with_absolute_paths(settings),
            primary=[],
            foreign=[],
            output=str(Path(own.out).absolute()),
            secret=_secret(own.secret_file).hex(),
            drain=own.drain,
            replicas=[
                Replica(**dataclasses.asdict(place), name=name, directory=str(work / REGISTRY / name))
                for name, place in settings.replicas.items()
            ],
            pipelines=[
                _pipeline(name, place, work) for name, place in settings.datacenters.items() if place.joiners
            ],
            regions={name: place.region or name for name, place in settings.datacenters.items()},
        )
        if settings.metrics.serve:
            topology.metrics.update(_metrics(topology, settings.metrics.port_offset))
        check_processes(topology)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from error
    return topology


def check_processes(topology: Topology) -> None:
    """SettingsError: the third joiner of `east` is `joiner-east-2`, and so is the first of `east-2`."""
    names = topology.titles()
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingsError(
            f"two processes would be named {min(twice)}; run fewer of a role, or rename a datacenter"
        )


def _pipeline(name: str, place: DatacenterPlace, work: Path) -> Pipeline:
    logs = {kind: tuple(map(absolute, getattr(place, kind))) for kind in ("primary", "foreign")}
    return Pipeline(**dataclasses.asdict(place) | logs, datacenter=name, directory=str(work / name))


def _metrics(topology: Topology, port_offset: int) -> dict[str, str]:
    """Process -> the advertised host, and the port that is so far above the gRPC port."""
    found = {}
    for process in topology.processes():
        host, port = split_address(process.address, process.title)
        if port + port_offset >= 1 << 16:
            raise SettingsError(
                f"'metrics.port_offset' leads {process.title} past port 65535; set a smaller one"
            )
        found[process.title] = joined(host, port + port_offset)
    return found


def _secret(file: str) -> bytes:
    if not file:
        return b""  # which the replicas refuse beyond loopback
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            secret = opened.read().strip()
    except OSError as error:
        raise SettingsError(
            f"'system.secret_file': {file} cannot be read ({error.strerror}); make one of "
            f"{SECRET_BYTES_MIN} random bytes or more, the same on all machines"
        ) from error
    if mode & 0o077:
        raise SettingsError(
            f"'system.secret_file': {file} is open to others than its owner ({mode & 0o777:o}): "
            f"chmod 600 {file}"
        )
    if len(secret) < SECRET_BYTES_MIN:
        raise SettingsError(f"'system.secret_file': {file} must hold {SECRET_BYTES_MIN} bytes or more")
    return secret


def _check(settings: Settings) -> None:
    if not settings.replicas:
        raise SettingsError(
            "the settings name no registry replica: add [replicas.NAME] with datacenter, grpc and raft"
        )
    _check_sets(settings)
    for section, names in (("replicas", settings.replicas), ("datacenters", settings.datacenters)):
        for name in names:
            _check_name(f"[{section}.{name!r}]", name)
    for name in settings.datacenters:
        if name in _OWN_NAMES or name.startswith("logs-"):  # of generated logs
            raise SettingsError(
                f"[datacenters.{name}]: Photon has files of that name beside its directories; rename it"
            )
    for name, replica in settings.replicas.items():
        where = f"replicas.{name}"
        if settings.datacenters and replica.datacenter not in settings.datacenters:
            raise SettingsError(
                f"'{where}.datacenter': there is no [datacenters.{replica.datacenter}]; there are: "
                f"{', '.join(settings.datacenters)}"
            )
        for key in ("grpc", "raft", "listen_grpc", "listen_raft"):
            address = getattr(replica, key)
            if address or not key.startswith("listen"):
                split_address(address, f"'{where}.{key}'")
    for name, datacenter in settings.datacenters.items():
        _check_pipeline(name, datacenter)
    _check_apart(settings)
    _check_via(settings)


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{where}: a name has lower-case letters, digits, '-' and '_', 63 at most")


def _check_sets(settings: Settings) -> None:
    sets = Counter(replica.set for replica in settings.replicas.values())
    if MAIN_SET not in sets:
        raise SettingsError(f"[replicas] names no replica of the set '{MAIN_SET}', which has the directory")
    for name, count in sets.items():
        _check_name(f"[replicas] set {name!r}", name)
        if count % 2 == 0:
            raise SettingsError(
                f"[replicas] names an even number of replicas (set '{name}'): one more or less tolerates as "
                "many failures"
            )


def _check_pipeline(name: str, place: DatacenterPlace) -> None:
    where = f"datacenters.{name}"
    keys = [f"{role}s" for role in PIPELINE_ROLES]
    needed = {key: getattr(place, key) for key in (*keys, "primary", "foreign")}
    importers = needed.pop("importers")
    imported = any(map(is_source, (*place.primary, *place.foreign)))
    if imported != bool(importers) or len(importers) > 1:
        raise SettingsError(
            f"'{where}.importers': name the address of one importer if 'primary' or 'foreign' has what is no "
            "log file (kafka://, s3://, .csv, .parquet), else none"
        )
    missing = [key for key, values in needed.items() if not values]
    if missing and len(missing) < len(needed):
        raise SettingsError(
            f"[{where}] lacks {', '.join(missing)}: a pipeline has all of {', '.join(needed)}"
        )
    for key in keys:
        for address in getattr(place, key):
            split_address(address, f"'{where}.{key}'")


def _check_via(settings: Settings) -> None:
    known = [address for _, address in (*_grpc_servers(settings), *_raft_servers(settings))]
    for name, dialed in settings.via.items():
        if name not in settings.datacenters:
            raise SettingsError(f"[via.{name}]: there is no [datacenters.{name}]")
        for advertised, there in dialed.items():
            split_address(advertised, f"[via.{name}]")
            split_address(there, f"'via.{name}.{advertised}'")
            if advertised not in known:
                (nearest,) = get_close_matches(advertised, known, n=1, cutoff=0)
                raise SettingsError(
                    f"[via.{name}]: {advertised} is the address of no process; did you mean '{nearest}'?"
                )


def _check_apart(settings: Settings) -> None:
    """Two servers at one address, by whatever name: one of them would never be reached."""
    seen: dict[tuple[str, int], str] = {}
    for where, address in (*_grpc_servers(settings), *_raft_servers(settings)):
        at = _same_host(address)
        if at in seen:
            raise SettingsError(f"{where} and {seen[at]} have the same address {address}; set another")
        seen[at] = where
    if not settings.metrics.serve:
        return
    for where, address in _grpc_servers(settings):
        host, port = _same_host(address)
        at = host, port + settings.metrics.port_offset
        if at in seen:
            raise SettingsError(
                f"'metrics.port_offset' leads the metrics of {where} to {at[0]}:{at[1]}, where "
                f"{seen[at]} is; set another"
            )
        seen[at] = f"the metrics of {where}"


def _same_host(address: str) -> tuple[str, int]:
    """The same for all spellings of a host that can be known without asking anybody."""
    host, port = split_address(address, "address")
    host = host.lower()
    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)), port
    except ValueError:
        return host, port


def _grpc_servers(settings: Settings) -> Iterable[tuple[str, str]]:
    """Where it stands in the settings, and the address. Each has a port of metrics, too."""
    for name, replica in settings.replicas.items():
        yield f"'replicas.{name}.grpc'", replica.grpc
    for name, place in settings.datacenters.items():
        for role in PIPELINE_ROLES:
            for address in getattr(place, f"{role}s"):
                yield f"'datacenters.{name}.{role}s'", address


def _raft_servers(settings: Settings) -> Iterable[tuple[str, str]]:
    return ((f"'replicas.{name}.raft'", replica.raft) for name, replica in settings.replicas.items())
