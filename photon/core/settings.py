"""Settings: frozen dataclasses, read once from TOML, checked once, passed in (docs/configuration.md).

The sections come first, then how a document is read into them, then what they must fulfil together, then by
which of them an event is the same event on two machines. An unknown key is an error that names the nearest
known one; a value out of range says what it may be.
"""

import dataclasses
import difflib
import hashlib
import json
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from photon.core.errors import SettingsError

MAIN_SET: Final = "main"
"""The set of registry replicas that has the directory (idregistry.rules.sharding)."""
TIME_UNITS: Final = ("s", "ms", "us", "ns", "rfc3339")
OUTPUT_FORMATS: Final = ("jsonl", "parquet")

MIB: Final = 1 << 20
BATCH_IDS_MAX: Final = 65_536
"""Ids in one request, to whatever role."""
_DOT: Final = "\0"  # in no setting

_TYPE_NAMES: Final = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


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
    """[ids]: of opaque ids. The key of their digests: never change it while ids are remembered."""

    key: str = "photon"
    time_spread_max_s: float = _bounded(3600.0, 0.0, 30 * 86_400)
    """How far apart the times of two copies of an event may be. A registry keeps what it was founded with."""


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
    """Ids older than this are forgotten and their events expire; 0 keeps all (for replayed history). Where a
    system reads what happens now, `forgetting` has another default."""
    queue_ids_max: int = _bounded(200_000, 1, 100_000_000)
    batch_ids_max: int = _bounded(16_384, 1, 1_000_000)
    batches_in_flight_max: int = _bounded(16, 1, 1024)
    election_timeout_ms: int = _bounded(1_000, 50, 60_000)
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
    name: str = field(default="photon", metadata={"may_be_empty": True})
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
    set: str = MAIN_SET
    """Whose shards it hosts; the directory is of the set `main`."""
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
    importers: tuple[str, ...] = ()
    """One, where `primary` or `foreign` name sources that are no log files."""


PIPELINE_ROLES: Final = ("importer", "eventstore", "joiner", "dispatcher")
"""Whose processes a datacenter has, as they are started; a joiner's address is among `joiners`."""


@dataclass(frozen=True, slots=True)
class Imports:
    """[imports]: copies of sources that are no log files (Kafka, tables)."""

    file_bytes_max: int = _bounded(256 * MIB, 1024, 1 << 40)
    bytes_max: int = _bounded(64 << 30, 1 * MIB, 1 << 44)
    """Of the copies of each source; it is not read on while they are so large."""
    keep_days: float = _bounded(7.0, 0.0, 36_500)
    """Copies that are older are deleted, where the source is followed; 0 keeps all."""


@dataclass(frozen=True, slots=True)
class EventStore:
    """[eventstore]: cache and logs of primary events (paper 3.4)."""

    processes: int = _bounded(1, 1, 64)
    """A datacenter's: each has the log file map, a share of the cache and a share of the logs to read."""
    virtual_nodes: int = _bounded(64, 1, 4096)
    """Of each process on the ring of consistent hashing."""
    cache_bytes: int = _bounded(256 * MIB, 1 * MIB, 1 << 40)
    """Of each process."""
    map_bytes_max: int = _bounded(64 << 30, 1 * MIB, 1 << 44)
    read_on_bytes_max: int = _bounded(1 * MIB, 0, 1 << 30)
    """While the map is behind the logs, a lookup reads on so far behind its last entry."""
    request_timeout_s: float = _bounded(10.0, 0.1, 600)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """[dispatcher]: reading, sending and retrying foreign events (paper 3.2)."""

    workers: int = _bounded(1, 1, 64)
    """On one machine, processes of a datacenter; on several, shares of its foreign logs, if that is more than
    dispatchers. It stands from the first start on."""
    batch_events_max: int = _bounded(4096, 1, BATCH_IDS_MAX)
    batches_in_flight_max: int = _bounded(3, 1, 256)
    lookup_before_send: bool = True
    home_hedge_ms: int = _bounded(1000, 0, 60_000)
    """Its home datacenter joins an event at once; the others wait for that, at most so long; 0: no homes."""
    retry_delay_ms_min: int = _bounded(20, 1, 3_600_000)
    retry_delay_ms_max: int = _bounded(60_000, 1, 86_400_000)
    """After a failure."""
    absent_delay_ms_max: int = _bounded(3_600_000, 1, 86_400_000)
    """Where the primary event is not there yet."""
    state_bytes_max: int = _bounded(16 << 30, 1 * MIB, 1 << 44)
    """Of a ledger; reading pauses while events that wait fill three quarters of it."""
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
    sinks: tuple[str, ...] = ()
    """URIs that the joined lines are published to, beside the joined log."""
    output_format: str = _one_of("jsonl", OUTPUT_FORMATS)
    """In which complete files are kept."""
    fsync: bool = True
    mark_matched: bool = False
    """Register with each event that its primary event is matched, which then nobody can call unmatched."""


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
    timeout_s: float = _bounded(30.0, 0.1, 3600)
    """A joiner whose adapter works longer than this on one event ends, and starts again."""


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
    imports: Imports = field(default_factory=Imports)
    eventstore: EventStore = field(default_factory=EventStore)
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    joiner: Joiner = field(default_factory=Joiner)
    adapter: Adapter = field(default_factory=Adapter)
    metrics: Metrics = field(default_factory=Metrics)


def load_settings(path: str | Path | None) -> Settings:
    """Read photon.toml; the defaults without one. SettingsError names file, key and mend."""
    return parse_settings(read_document(None if path is None else Path(path)), str(path))


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


SERVED_RETENTION_DAYS: Final = 3.0


def forgetting(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a system that reads what happens now: where it says nothing, old ids are forgotten."""
    registry = document.get("registry", {})
    if not isinstance(registry, Mapping):
        return dict(document)  # as it is refused
    return {**document, "registry": {"retention_days": SERVED_RETENTION_DAYS, **registry}}


def parse_settings(document: Mapping[str, Any], source: str = "settings") -> Settings:
    """A parsed document -> checked settings."""
    if document.get("replicas"):
        document = forgetting(document)
    settings: Settings = _build(Settings, document, source)
    _check_together(settings, source)
    return settings


def to_document(settings: Settings) -> dict[str, Any]:
    """The reverse of parse_settings, for handing settings to another process."""
    document: dict[str, Any] = _plain(dataclasses.asdict(settings))
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _build(cls: Any, document: Mapping[str, Any], source: str, section: str = "") -> Any:
    """An instance of the dataclass. `source` and `section`: where the document stands, for the message."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in document.items():
        where = f"{section}.{_shown(name)}" if section else _shown(name)
        if name not in known:
            kind = "setting" if section else "section"
            raise SettingsError(f"{source}: unknown {kind} '{where}'{_nearest(name, known, section)}")
        limits = {"may_be_empty": known[name].default == "", **known[name].metadata}
        values[name] = _value(hints[name], value, limits, source, where)
    for name, one in known.items():
        missing = one.default is one.default_factory is dataclasses.MISSING
        if missing and name not in values:
            raise SettingsError(f"{source}: [{section}] lacks '{name}'; set it")
    return cls(**values)


def _value(hint: Any, value: Any, limits: Mapping[str, Any], source: str, where: str) -> Any:
    """A value, a section, or a section of sections that the user names."""
    of_names = typing.get_origin(hint) is dict
    if not of_names and not dataclasses.is_dataclass(hint):
        return _check_value(value, hint, limits, f"{source}: '{where}'")
    if not isinstance(value, Mapping):
        raise SettingsError(f"{source}: '{where}' must be a section: write [{where}]")
    if not of_names:
        return _build(hint, value, source, where)
    _, inner = typing.get_args(hint)
    return {name: _value(inner, one, {}, source, f"{where}.{_shown(name)}") for name, one in value.items()}


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)[1:-1]


def _nearest(name: str, known: Mapping[str, Any], section: str) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    prefix = f"{section}." if section else ""
    return f"; did you mean '{prefix}{matches[0]}'?" if matches else f"; known are: {', '.join(known)}"


def _check_value(value: Any, hint: Any, limits: Mapping[str, Any], where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint == tuple[str, ...]:
        return _check_names(value, where)
    if type(value) is not hint:
        raise SettingsError(f"{where} must be {_TYPE_NAMES[hint]}, not {value!r}")
    if hint is str and not value and "choices" not in limits and not limits.get("may_be_empty"):
        raise SettingsError(f"{where} must not be empty")
    if "choices" in limits and value not in limits["choices"]:
        raise SettingsError(f"{where} must be one of {', '.join(limits['choices'])}, not {value!r}")
    if "low" in limits and not limits["low"] <= value <= limits["high"]:
        raise SettingsError(f"{where} must be from {limits['low']} to {limits['high']}, not {value!r}")
    return value


def _check_names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise SettingsError(f"{where} must be a list of names, not {value!r}")
    return tuple(value)


def _check_together(settings: Settings, source: str) -> None:
    """SettingsError for settings that are each in range and can't hold together."""
    dispatcher = settings.dispatcher
    if dispatcher.retry_delay_ms_max < dispatcher.retry_delay_ms_min:
        raise SettingsError(
            f"{source}: 'dispatcher.retry_delay_ms_max' is below 'dispatcher.retry_delay_ms_min'"
        )
    if settings.registry.replicas % 2 == 0:
        raise SettingsError(
            f"{source}: 'registry.replicas' must be odd: an even one more tolerates no more failures"
        )
    files = {f"tls.{name}": [value] for name, value in dataclasses.asdict(settings.tls).items()}
    for where, values in (files | {"joiner.output_roots": settings.joiner.output_roots}).items():
        if any("\0" in value for value in values):
            raise SettingsError(f"{source}: '{where}' must have no NUL character")
    if len({bool(settings.tls.cert), bool(settings.tls.key), bool(settings.tls.ca)}) > 1:
        raise SettingsError(f"{source}: 'tls.cert', 'tls.key' and 'tls.ca' go together: set all or none")
    names = {f"foreign.{name}": value for name, value in dataclasses.asdict(settings.foreign).items()}
    del names["foreign.time_unit"]
    if len(set(names.values())) < len(names):
        raise SettingsError(f"{source}: {', '.join(map(repr, names))} must name different fields")
    names |= {"primary.id": settings.primary.id, "primary.time": settings.primary.time}
    for where, name in names.items():
        if not name.isprintable() or '"' in name or "\\" in name:
            raise SettingsError(f"{source}: '{where}' must have no quotes, backslashes or control characters")
    _check_paths(names, settings.adapter.field, source)
    if len(settings.ids.key.encode()) > 64:
        raise SettingsError(f"{source}: 'ids.key' must be at most 64 bytes")


def parse_path(text: str) -> tuple[str, ...]:
    """What a setting says of where a field is (photon.core.columns). SettingsError for an empty part."""
    parts = tuple(part.replace(_DOT, ".") for part in text.replace("..", _DOT).split("."))
    if "" in parts:
        raise SettingsError(
            f"field path '{text}' has an empty part; write 'object.field', and two dots for a dot in a name"
        )
    return parts


def _check_paths(names: Mapping[str, str], field_name: str, source: str) -> None:
    paths: dict[str, tuple[str, ...]] = {}
    for where, name in names.items():
        try:
            paths[where] = parse_path(name)
        except SettingsError as error:
            raise SettingsError(f"{source}: '{where}': {error}") from error
    foreign = {where: path for where, path in paths.items() if where.startswith("foreign.")}
    for outer, path in foreign.items():
        for inner, longer in foreign.items():
            if inner != outer and longer[: len(path)] == path:
                raise SettingsError(f"{source}: '{inner}' lies within '{outer}': one can't be in the other")
    for where, path in foreign.items():
        # An object with two fields of one name is read in as many ways as there are readers.
        if path[0] == field_name:
            raise SettingsError(
                f"{source}: 'adapter.field' is {field_name!r}, which is the field of '{where}'; "
                "name another for the primary event"
            )


IDENTITY_DIGEST_BYTES: Final = 16
_KEY_DIGEST_BYTES: Final = 8
_READING_DIGEST_BYTES: Final = 12


_MARKS: Final = "joiner.mark_matched"


def identity_settings(settings: Settings) -> dict[str, Any]:
    """By which an event is the same event on two machines; of the key its digest.

    Ids are digests under `ids.key` of what the fields of [foreign] hold. Where two processes of a system
    differ in any of that, the registry takes one event for two, and it is joined twice. Where joiners mark
    primary events all must, and find the same id and time.
    """
    document = to_document(settings)
    key = hashlib.blake2b(settings.ids.key.encode(), digest_size=_KEY_DIGEST_BYTES)
    return {
        "ids.key (digest)": key.hexdigest(),
        **{f"foreign.{name}": value for name, value in document["foreign"].items()},
        _MARKS: settings.joiner.mark_matched and document["primary"],
    }


def identity_digest(settings: Settings) -> bytes:
    """16 bytes, the same only where the settings are, in every version of this program.

    A registry keeps it for its whole life: a setting that is ever added must be left out here while it has
    its default.
    """
    found = identity_settings(settings)
    if not found[_MARKS]:
        del found[_MARKS]
    facts = json.dumps(found, sort_keys=True, ensure_ascii=False).encode()
    return hashlib.blake2b(facts, digest_size=IDENTITY_DIGEST_BYTES).digest()


def reading_fingerprint(settings: Settings) -> str:
    """Hex; equal where the same line has the same ids and the same time, and is an event in both or neither.

    An event that reached the registry under another id or time than its log line has would be joined twice.
    """
    facts = (
        settings.primary.id,
        settings.foreign.id,
        settings.foreign.primary_id,
        settings.foreign.time,
        settings.foreign.time_unit,
        settings.ids.key,
        settings.logs.line_bytes_max,
    )
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=_READING_DIGEST_BYTES).hexdigest()
