"""Reads for `photon recover`: which registered ids stand in no joined log, and their lines in the inputs.

Whatever stands in a joined log in any form counts, because recovery joins again what it takes for missing: a
last line without its newline counts if it is a whole JSON object, and a line that is an object without
telling its event is counted apart from one that is damaged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from idregistry.client import RegistryAt
from joiner.joined_lines import JoinedDecoder
from photon.core.columns import pack_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import IdPacker
from photon.core.settings import Settings, parse_path
from photon.logs.files import Chunk, is_object
from spark.losses import Loss, LostEvents, Survey
from spark.options import SCAN_TIMEOUT_S
from spark.reading.events import parsed
from spark.reading.lines import ChunkParser, LogSet, Parse, fixed_binary, for_joined
from spark.reading.paths import existing, input_paths, output_paths
from spark.registered import registered, signed, unsigned
from spark.session import spark_failures


def missing(registered: DataFrame, joined: DataFrame) -> DataFrame:
    """The registered ids (spark.registered) that no joined line has (joined_keys)."""
    there = joined.where("id IS NOT NULL").select("id")
    return registered.join(there, "id", "left_anti")


def losses(absent: DataFrame, young_us: int, doubtful_us: int) -> DataFrame:
    """`missing` -> a row an incarnation: address, incarnation, lost, young
    (their tokens are later than `young_us`), doubtful (not later than `doubtful_us`), oldest_us."""
    young = F.col("token_us") > young_us
    return absent.groupBy("address", "incarnation").agg(
        F.count_if(~young).alias("lost"),
        F.count_if(young).alias("young"),
        F.count_if(F.col("token_us") <= doubtful_us).alias("doubtful"),
        F.min("token_us").alias("oldest_us"),
    )


def in_inputs(lost: DataFrame, foreign: DataFrame) -> DataFrame:
    """Lost ids (id, token, incarnation) -> a row each: id, token, lines (array of time_us, line: each once),
    bytes (of the lines, at most).

    An id that stands in several lines has them all: nobody knows which was joined.
    """
    return (
        lost.join(foreign, "id")
        .groupBy("id", "token")
        .agg(
            F.collect_set(F.struct("time_us", "line")).alias("lines"),
            F.sum(F.length("line")).alias("bytes"),
        )
    )


def not_in_inputs(lost: DataFrame, found: DataFrame) -> DataFrame:
    """A row an incarnation: how many (`events`) of its lost ids no line has."""
    return (
        lost.join(found.select("id"), "id", "left_anti")
        .groupBy("incarnation")
        .agg(F.count(F.lit(1)).alias("events"))
    )


KEYS: Final = "id binary, untold int, damaged int"
_FOREIGN: Final = "id binary, time_us long, line binary"


def joined_keys(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> KEYS: the packed id of each joined line, with both counts 0; and rows with a null id that count the
    lines that tell none. Files as they are now.

    UsageError for settings by which joined lines do not tell their foreign event.
    """
    check_told(settings)
    make = partial(_key_rows, settings)
    logs = LogSet(paths, for_joined(settings), make, unended=True, make_for_parquet=make)
    return parsed(session, logs, KEYS)


def check_told(settings: Settings) -> None:
    """UsageError where joined lines do not hold the foreign event's id."""
    if parse_path(settings.foreign.id)[0] == settings.adapter.field:
        raise UsageError(
            f"'adapter.field' is {settings.adapter.field!r}, and 'foreign.id' lies in it: joined lines do "
            "not tell which foreign event they hold, so what is lost can't be known"
        )


def _key_rows(settings: Settings) -> Parse:
    packer, lines = IdPacker(settings.ids.key.encode()), JoinedDecoder(settings)

    def rows(_name: str, _path: str, chunk: Chunk) -> Iterator[Any]:
        found = lines.decode(b"" if chunk.oversized else chunk.data)
        if ids := lines.columns["id"](found.events):
            none = pa.repeat(pa.scalar(0, pa.int32()), len(ids))
            columns = {"id": fixed_binary(packer.pack(ids)), "untold": none, "damaged": none}
            yield pa.RecordBatch.from_pydict(columns)
        untold = sum(is_object(bad.line) for bad in found.malformed)
        counts = {"untold": untold + chunk.oversized, "damaged": len(found.malformed) - untold}
        if any(counts.values()):
            columns = {name: pa.array([count], pa.int32()) for name, count in counts.items()}
            yield pa.RecordBatch.from_pydict({"id": pa.nulls(1, pa.binary()), **columns})

    return rows


def _foreign_rows(settings: Settings) -> Parse:
    """-> _FOREIGN: the events, without malformed lines."""
    parser = ChunkParser(settings)

    def rows(_name: str, path: str, chunk: Chunk) -> Iterator[Any]:
        batch = parser.foreign(path, chunk)
        columns = {"id": fixed_binary(batch.ids), "time_us": np.frombuffer(batch.times, "<i8")}
        yield pa.RecordBatch.from_pydict({**columns, "line": pa.array(batch.lines, pa.binary())})

    return rows


PIECE_EVENTS_MAX: Final = 50_000
PIECE_BYTES_MAX: Final = 32 << 20
"""Of lines, in a partition, which Spark brings to the driver whole; a piece has at most one line more."""
LISTINGS_MAX: Final = 20
"""Of the joined logs, until two of them agree."""
_NEVER_PASS_OVER: Final = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read: globs of the inputs; each output, with joined/ in it; the registry, and how long the scan
    of one of its shards may take."""

    foreign: Sequence[str]
    outs: Sequence[str]
    registry: RegistryAt
    scan_timeout_s: float = SCAN_TIMEOUT_S


class SparkReading:
    """photon.recovery.recover.Reading. SparkFailedError where a job fails: ask again."""

    def __init__(
        self, session: SparkSession, sources: Sources, settings: Settings, details: str = ""
    ) -> None:
        """`details`: where the survey's missing ids go as Parquet (id in hex, joiner, incarnation, token_us);
        "" for nowhere."""
        self._session = session
        self._details = details
        self._sources = sources
        self._settings = settings
        for name in _NEVER_PASS_OVER:  # a joined log that is not read would seem lost
            session.conf.set(name, "false")

    def survey(self, young_us: int, doubtful_us: int) -> Survey:
        """The registry first: what is registered after its reading is nobody's loss yet."""
        with spark_failures():
            ids = self._registered().persist(StorageLevel.DISK_ONLY)
            count = ids.count()
            keys = self._joined().persist(StorageLevel.DISK_ONLY)
            untold, damaged, joined = _counts(keys)
            absent = missing(ids, keys)
            if self._details:
                identity, life = F.lower(F.hex("id")), F.lpad(F.lower(F.hex("incarnation")), 16, "0")
                whose = F.col("address").alias("joiner"), life.alias("incarnation")
                absent.select(identity.alias("id"), *whose, "token_us").write.parquet(self._details)
            rows = losses(absent, young_us, doubtful_us).collect()
            keys.unpersist()
            ids.unpersist()
        known = count - sum(row.lost + row.young for row in rows)
        found = [
            Loss(r.address, unsigned(r.incarnation), r.lost, r.young, r.doubtful, r.oldest_us) for r in rows
        ]
        found.sort(key=lambda loss: -loss.lost)
        return Survey(count, untold, damaged, found, joined, known)

    def lost(self, incarnations: Sequence[int]) -> "SparkLost":
        """After their fence: what they hold, and what of it stands in no joined log by now."""
        with spark_failures():
            theirs = F.col("incarnation").isin(list(map(signed, incarnations)))
            held = self._registered().where(theirs).select("id", "token", "incarnation")
            held = held.persist(StorageLevel.DISK_ONLY)
            held.count()
            keys = self._joined().persist(StorageLevel.DISK_ONLY)
            untold, _, _ = _counts(keys)
            lost = missing(held, keys).persist(StorageLevel.DISK_ONLY)
            lost.count()
            keys.unpersist()
            held.unpersist()
            return SparkLost(lost, untold, self._foreign)

    def _registered(self) -> DataFrame:
        return registered(self._session, self._sources.registry, self._sources.scan_timeout_s)

    def _joined(self) -> DataFrame:
        return joined_keys(self._session, listed_twice(self._files), self._settings)

    def _files(self) -> list[str]:
        paths = [path for out in self._sources.outs for path in output_paths(out, "joined")]
        return existing(self._session, paths)

    def _foreign(self) -> DataFrame:
        paths, make = input_paths(self._sources.foreign), partial(_foreign_rows, self._settings)
        return parsed(self._session, LogSet(paths, self._settings, make, unended=True), _FOREIGN)


def listed_twice(files: Callable[[], list[str]]) -> list[str]:
    """What `files` lists, once it lists the same again.

    Outputs are listed one after another: a file that is moved from a later one to an earlier one meanwhile is
    seen in neither. It is seen by the next listing. UnavailableError if they never agree.
    """
    before = files()
    for _ in range(LISTINGS_MAX):
        if (again := files()) == before:
            return again
        before = again
    raise UnavailableError(
        "joined logs come, go or are moved all the time, so that not all of them can be read; nothing is "
        "released. Run again when no files are moved"
    )


class SparkLost:
    """photon.recovery.recover.LostReading."""

    def __init__(self, lost: DataFrame, untold: int, foreign: Callable[[], DataFrame]) -> None:
        self.untold = untold
        self.missing: dict[int, int] = {}
        self._lost = lost
        self._foreign = foreign

    def events(self) -> Iterator[LostEvents]:
        with spark_failures():
            found = in_inputs(self._lost, self._foreign()).persist(StorageLevel.DISK_ONLY)
            rows = not_in_inputs(self._lost, found).collect()
            self.missing = {unsigned(row.incarnation): row.events for row in rows}
            size = found.agg(F.count(F.lit(1)).alias("events"), F.sum("bytes").alias("bytes")).collect()[0]
            parts = 1 + max(size.events // PIECE_EVENTS_MAX, (size.bytes or 0) // PIECE_BYTES_MAX)
            yield from pieces(found.repartition(parts, "id").toLocalIterator())
            found.unpersist()
            self._lost.unpersist()


def pieces(rows: Iterator[Any]) -> Iterator[LostEvents]:
    """Rows of recovery.in_inputs, some at a time."""
    held: list[Any] = []
    size = 0
    for row in rows:
        held.append(row)
        size += sum(len(one.line) for one in row.lines)
        if len(held) >= PIECE_EVENTS_MAX or size >= PIECE_BYTES_MAX:
            yield _piece(held)
            held, size = [], 0
    if held:
        yield _piece(held)


def _piece(rows: list[Any]) -> LostEvents:
    lines = b"".join([bytes(one.line) + b"\n" for row in rows for one in row.lines])
    keys = sorted({(bytes(row.token), bytes(row.id), one.time_us) for row in rows for one in row.lines})
    counts = [(token, len(list(group))) for token, group in groupby(keys, key=lambda key: key[0])]
    return LostEvents(
        b"".join([key[1] for key in keys]),
        pack_times([key[2] for key in keys]),
        [token for token, _ in counts],
        [count for _, count in counts],
        lines,
    )


def _counts(keys: DataFrame) -> tuple[int, int, int]:
    """Untold lines, damaged ones, and how many ids there are, nearly."""
    row = keys.agg(
        F.sum("untold").alias("untold"),
        F.sum("damaged").alias("damaged"),
        F.approx_count_distinct("id").alias("ids"),
    ).collect()[0]
    return row.untold or 0, row.damaged or 0, row.ids
