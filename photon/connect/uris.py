"""What names a source or a sink: `scheme://place/path?option=value`, or a table by its suffix.

Others add schemes by entry points of the groups `photon.sources` and `photon.sinks`: a `SourceMaker` or a
`SinkMaker`, named as its scheme.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from photon.connect.ports import Fields, Sink, Source
from photon.core.errors import PhotonError, UnavailableError, UsageError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_TABLES: Final = {".csv": "csv", ".csv.gz": "csv", ".parquet": "parquet"}
OBJECTS: Final = ("s3", "gs", "az")
_OURS: Final[dict[str, dict[str, str]]] = {
    "source": {
        "kafka": "photon.connect.kafka:KafkaSource",
        "csv": "photon.connect.local_files:make_csv",
        "parquet": "photon.connect.local_files:make_parquet",
        **dict.fromkeys(OBJECTS, "photon.connect.stored_objects:make_objects"),
    },
    "sink": {
        "kafka": "photon.connect.kafka_sink:KafkaSink",
        "postgresql": "photon.connect.postgresql:PostgresqlSink",
        "iceberg": "photon.connect.iceberg:IcebergSink",
        "otlp": "photon.connect.traces:TraceSink",
        **dict.fromkeys((*OBJECTS, "file"), "photon.connect.objects:ObjectSink"),
    },
}
_EXTRAS: Final = {
    "confluent_kafka": "kafka",
    "psycopg": "postgresql",
    "obstore": "objects",
    "pyiceberg": "iceberg",
    "opentelemetry": "otlp",
}


@dataclass(frozen=True, slots=True)
class Uri:
    """A parsed one. `text`: as it was given; `place`: hosts, a bucket; `path` without its first slash."""

    text: str
    scheme: str
    place: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Without options and passwords: for messages and statuses."""
        place = self.place.rpartition("@")[2]
        return f"{self.scheme}://{place}/{self.path}"

    def take(self, known: Mapping[str, str]) -> dict[str, str]:
        """The options, with these defaults. UsageError for others."""
        for name in self.options:
            if name not in known:
                raise UsageError(
                    f"{self.shown}: unknown option '{name}'; known are: {', '.join(known) or 'none'}"
                )
        return {**known, **self.options}


def in_words(
    uri: Uri, error: Exception, never_works: tuple[type[Exception], ...], detail: str | None = None
) -> PhotonError:
    """What a sink's library has raised, as UsageError where no other try can work, else UnavailableError."""
    told = f"{uri.shown}: {first_line(error)}" + (f" ({detail})" if detail else "")
    return UsageError(told) if isinstance(error, never_works) else UnavailableError(f"{told}; tried again")


def batching(uri: Uri, given: dict[str, str]) -> tuple[int, float]:
    """A sink's `batch_bytes` and `linger_s`, for stores of files: its options `mib` and `every_s`, which are
    taken out of those given. UsageError."""
    mib = _number(uri, "mib", given.pop("mib", "32"), 1024.0)
    return round(mib * (1 << 20)), _number(uri, "every_s", given.pop("every_s", "60"), 86_400.0)


def _number(uri: Uri, name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise UsageError(f"{uri.shown}: {name} is a number above 0 up to {most:g}, not '{text}'")
    return value


def known_as(text: str) -> list[str]:
    """ "source", "sink" or both: what its scheme can be. UsageError: neither."""
    uri = parse_uri(text)
    schemes = {kind: _schemes(kind) for kind in _OURS}
    kinds = [kind for kind, known in schemes.items() if uri.scheme in known]
    if not kinds:
        names = ", ".join(f"{name}://" for name in {**schemes["source"], **schemes["sink"]})
        raise UsageError(f"{uri.shown}: nothing is known by '{uri.scheme}://'; known are {names}")
    return kinds


SourceMaker = Callable[[Uri, Fields], Source]
"""May raise UsageError; waits for nobody yet."""
SinkMaker = Callable[[Uri, str], Sink]
"""The same; its second argument is the writer."""


def is_source(text: str) -> bool:
    """Whether it names a source that is no pattern of log files."""
    return _SCHEME.match(text) is not None or table_of(text) is not None


def is_known_source(text: str) -> bool:
    """The same, where other URIs, and objects of a store, are for Spark to read."""
    return is_source(text) and parse_uri(text).scheme in _schemes("source").keys() - set(OBJECTS)


def is_csv(text: str) -> bool:
    """Whether all its values are texts."""
    return is_source(text) and "csv" in ((uri := parse_uri(text)).scheme, table_of(uri.path))


def parse_uri(text: str) -> Uri:
    """UsageError where it is none."""
    table = table_of(text)
    if table is not None and _SCHEME.match(text) is None:
        return Uri(text, table, "", text)
    if _SCHEME.match(text) is None:
        raise UsageError(f"{text}: no URI; write kafka://HOST:PORT/TOPIC, for example")
    try:
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise UsageError(
            f"{text.partition('?')[0]}: no URI; write its options name=value&name=value"
        ) from error
    path = unquote(parts.path)
    if parts.scheme in _TABLES.values():
        return Uri(text, parts.scheme, "", parts.netloc + path, options)
    return Uri(text, parts.scheme, parts.netloc, path.removeprefix("/"), options)


def make_source(text: str, fields: Fields) -> Source:
    """UsageError: nobody knows the scheme, or it can't be made."""
    uri = parse_uri(text)
    made: Source = _maker("source", uri)(uri, fields)
    return made


def make_sink(text: str, writer: str) -> Sink:
    """UsageError, as make_source."""
    uri = parse_uri(text)
    made: Sink = _maker("sink", uri)(uri, writer)
    return made


def _maker(kind: str, uri: Uri) -> Callable[..., Any]:
    known = _schemes(kind)
    if uri.scheme not in known:
        names = ", ".join(f"{name}://" for name in known)
        raise UsageError(f"{uri.shown}: no {kind} is known by '{uri.scheme}://'; known are {names}")
    try:
        maker: Callable[..., Any] = known[uri.scheme].load()
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = _EXTRAS[missing]
        raise UsageError(f"{uri.shown}: needs {missing}: pip install 'photon-joiner[{extra}]'") from error
    return maker


def _schemes(kind: str) -> "dict[str, EntryPoint]":
    """What makes a source or a sink of each; ours before others'."""
    # Here: it takes a tenth of what all processes import, and few of them need it.
    from importlib.metadata import EntryPoint, entry_points

    group = f"photon.{kind}s"
    points = {name: EntryPoint(name, place, group) for name, place in _OURS[kind].items()}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return points


def table_of(name: str) -> str | None:
    """ "csv" or "parquet", by how it ends."""
    return next((kind for suffix, kind in _TABLES.items() if name.endswith(suffix)), None)
