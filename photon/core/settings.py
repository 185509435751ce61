"""Settings: frozen dataclasses, read once from TOML, checked once, passed in (docs/configuration.md).

What a value may be is checked in settings_reading.py, what they must be together in settings_together.py.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from photon.core.errors import SettingsError
from photon.core.settings_reading import build
from photon.core.settings_together import check_together

TIME_UNITS: Final = ("s", "ms", "us", "ns", "rfc3339")
OUTPUT_FORMATS: Final = ("jsonl", "parquet")

MIB: Final = 1 << 20


def _bounded(default: float | int, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _one_of(default: str, choices: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, slots=True)
class Primary:
    """[primary]: names of the fields of a primary event."""

    id: str = "id"
    time: str = "ts_us"
    time_unit: str = _one_of("us", TIME_UNITS)


@dataclass(frozen=True, slots=True)
class Foreign:
    """[foreign]: names of the fields of a foreign event."""

    id: str = "id"
    primary_id: str = "primary_id"
    time: str = "ts_us"
    time_unit: str = _one_of("us", TIME_UNITS)


@dataclass(frozen=True, slots=True)
class Ids:
    """[ids]: the key of the digests of opaque ids. Never change it while ids are remembered."""

    key: str = "photon"


@dataclass(frozen=True, slots=True)
class Logs:
    """[logs]: how log files are found and read."""

    scan_interval_s: float = _bounded(1.0, 0.01, 3600)
    poll_interval_ms: int = _bounded(10, 1, 60_000)
    chunk_bytes: int = _bounded(1 * MIB, 4096, 64 * MIB)
    line_bytes_max: int = _bounded(4 * MIB, 1024, 32 * MIB)
    watch: bool = True
    """Let the kernel tell of growth (inotify), beside the polls and scans that find what it misses."""
    spool_bytes_max: int = _bounded(64 << 30, 1 * MIB, 1 << 44)
    """Unpacked copies of compressed logs."""


@dataclass(frozen=True, slots=True)
class Registry:
    """[registry]: the IdRegistry (paper 2)."""

    shards: int = _bounded(1, 1, 4096)
    """When it is founded; `photon reshard` changes it later."""
    replicas: int = _bounded(3, 1, 9)
    retention_days: float = _bounded(0.0, 0.0, 36_500)
    """Ids older than this are forgotten and their events expire; 0 keeps all (for replayed history)."""
    queue_ids_max: int = _bounded(200_000, 1, 100_000_000)
    batch_ids_max: int = _bounded(16_384, 1, 1_000_000)
    batches_in_flight_max: int = _bounded(16, 1, 1024)
    election_timeout_ms: int = _bounded(300, 50, 60_000)
    request_timeout_s: float = _bounded(10.0, 0.1, 600)
    clock_skew_s: float = _bounded(60.0, 0.0, 86_400)
    """S of the paper: no event's time is further ahead of now; a resharding begins later."""
    lease_s: float = _bounded(10.0, 0.5, 3600)
    """A joiner that could not renew its lease for so long stops writing, and may be fenced."""
    leaders: tuple[str, ...] = ()
    """Replicas to lead the shards where they can; empty: spread over all."""


@dataclass(frozen=True, slots=True)
class Tls:
    """[tls]: PEM files that secure every port; none or all three."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    name: str = "photon"
    """Carried by every certificate, and looked for instead of host names; empty: host names are."""


@dataclass(frozen=True, slots=True)
class Network:
    """[network]: what the processes of a system listen on."""

    bind: str = ""
    """Host to bind in place of the advertised one's."""
    insecure_beyond_loopback: bool = False
    """Let whoever reaches the ports read and write everything, where there is no [tls]."""


@dataclass(frozen=True, slots=True)
class System:
    """[system]: where a system of several machines keeps things. `photon join` has options for these."""

    out: str = "photon-out"
    work: str = "photon-work"
    secret_file: str = ""
    """Holds what the registry's replicas prove to each other that they know."""
    drain: bool = False
    """The logs grow no more."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """[replicas.NAME]: one registry process, by the addresses that others know it by."""

    datacenter: str
    grpc: str
    raft: str
    listen_grpc: str = ""
    listen_raft: str = ""
    """What it binds, if not these (a proxy, a mapped port)."""


@dataclass(frozen=True, slots=True)
class DatacenterPlace:
    """[datacenters.NAME]: a datacenter's copy of the logs and its pipeline; one without has replicas only."""

    region: str = ""
    primary: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    eventstores: tuple[str, ...] = ()
    joiners: tuple[str, ...] = ()
    dispatchers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventStore:
    """[eventstore]: cache and logs of primary events (paper 3.4)."""

    processes: int = _bounded(1, 1, 64)
    """A datacenter's: one reads the logs and keeps the map; all of them hold shares of the cache."""
    virtual_nodes: int = _bounded(64, 1, 4096)
    """Of each process on the ring of consistent hashing."""
    cache_bytes: int = _bounded(256 * MIB, 1 * MIB, 1 << 40)
    """Of each process."""
    map_interval_bytes: int = _bounded(16 * 1024, 512, 64 * MIB)
    """M of the paper: a sparse entry points to at most so many bytes."""
    map_interval_s: float = _bounded(10.0, 0.001, 86_400)
    """W of the paper: a sparse entry covers at most so much event time."""
    map_bytes_max: int = _bounded(64 << 30, 1 * MIB, 1 << 44)
    read_on_bytes_max: int = _bounded(1 * MIB, 0, 1 << 30)
    """While the map is behind the logs, a lookup reads on so far behind its last entry."""
    request_timeout_s: float = _bounded(10.0, 0.1, 600)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """[dispatcher]: reading, sending and retrying foreign events (paper 3.2)."""

    workers: int = _bounded(1, 1, 64)
    """Processes of a datacenter that share the foreign logs."""
    lease_s: float = _bounded(5.0, 0.2, 600)
    """A worker that was not heard of for so long loses its files to the others."""
    batch_events_max: int = _bounded(4096, 1, 65_536)
    batches_in_flight_max: int = _bounded(3, 1, 256)
    lookup_before_send: bool = True
    retry_delay_ms_min: int = _bounded(20, 1, 3_600_000)
    retry_delay_ms_max: int = _bounded(60_000, 1, 86_400_000)
    """After a failure."""
    absent_delay_ms_max: int = _bounded(3_600_000, 1, 86_400_000)
    """Where the primary event is not there yet."""
    retry_queue_events_max: int = _bounded(1_000_000, 1, 1_000_000_000)
    """Reading pauses while so many events wait for their retry."""
    state_bytes_max: int = _bounded(16 << 30, 1 * MIB, 1 << 44)
    request_timeout_s: float = _bounded(30.0, 0.1, 600)


@dataclass(frozen=True, slots=True)
class Joiner:
    """[joiner]: joining, registering and writing (paper 3.3)."""

    processes: int = _bounded(1, 1, 64)
    requests_in_flight_max: int = _bounded(16, 1, 1024)
    commits_in_flight_max: int = _bounded(8, 1, 1024)
    """Commits to the IdRegistry on their way at a time, each of a batch."""
    unjoinable_tries_min: int = _bounded(10, 1, 1_000_000)
    unjoinable_age_s: float = _bounded(86_400.0, 0.0, 1e9)
    """An event is unjoinable after so many tries and so long after it was first read."""
    output_file_bytes_max: int = _bounded(256 * MIB, 1024, 1 << 40)
    output_file_s: float = _bounded(3600.0, 0.0, 1e9)
    """A joined log that is so old is complete and a new one begins; 0: by size alone."""
    output_roots: tuple[str, ...] = ()
    """More directories that get the same joined logs."""
    output_format: str = _one_of("jsonl", OUTPUT_FORMATS)
    """In which complete files are kept."""
    fsync: bool = True


@dataclass(frozen=True, slots=True)
class Metrics:
    """[metrics]: Prometheus."""

    serve: bool = False
    """Each process answers scrapes on a port of its own."""
    port_offset: int = _bounded(1000, 1, 60_000)
    """In a system of settings: so far above its gRPC port."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """[adapter]: the user's code (paper 3.3.1), `module:Class`; empty for the default splice."""

    use: str = ""
    field: str = "primary"
    """Of the joined object: holds the primary event."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All of photon.toml."""

    primary: Primary = field(default_factory=Primary)
    foreign: Foreign = field(default_factory=Foreign)
    ids: Ids = field(default_factory=Ids)
    logs: Logs = field(default_factory=Logs)
    registry: Registry = field(default_factory=Registry)
    tls: Tls = field(default_factory=Tls)
    network: Network = field(default_factory=Network)
    system: System = field(default_factory=System)
    replicas: dict[str, ReplicaPlace] = field(default_factory=dict)
    datacenters: dict[str, DatacenterPlace] = field(default_factory=dict)
    via: dict[str, dict[str, str]] = field(default_factory=dict)
    """Datacenter -> advertised address -> the one that its processes dial instead."""
    eventstore: EventStore = field(default_factory=EventStore)
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    joiner: Joiner = field(default_factory=Joiner)
    adapter: Adapter = field(default_factory=Adapter)
    metrics: Metrics = field(default_factory=Metrics)


def load_settings(path: Path | None) -> Settings:
    """Read photon.toml; the defaults without one. SettingsError names file, key and mend."""
    return parse_settings(read_document(path), str(path))


def read_document(path: Path | None) -> dict[str, Any]:
    """photon.toml as it stands there, for parse_settings; empty without one. SettingsError."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); name an existing file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error


def parse_settings(document: Mapping[str, Any], source: str = "settings") -> Settings:
    """A parsed document -> checked settings."""
    settings: Settings = build(Settings, document, source)
    check_together(settings, source)
    return settings


def to_document(settings: Settings) -> dict[str, Any]:
    """The reverse of parse_settings, for handing settings to another process."""
    document: dict[str, Any] = _plain(dataclasses.asdict(settings))
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value
