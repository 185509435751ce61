"""The rows of a backfill: all lines of its logs that matter, brought together by the primary id.

    key binary     the primary id that a line has or names (16 bytes); of others any
    place long     kind of row, number of the log, offset of the line: rows are sorted by it, primaries first
    id, time_us    of a foreign event; `time_us` of a COUNT is a number of events
    line binary
    reason string  of a malformed line

Primary lines that no foreign event names stay where they are read: a filter of one bit a hash drops them.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from photon.core.columns import hash_ids, take_ids
from photon.core.ids import ID_BYTES
from photon.core.settings import Settings
from photon.logs.formats import Malformed
from spark.reading.events import plan, run
from spark.reading.parsing import ChunkParser, fixed_binary
from spark.reading.ranges import LogFile, Range, chunks_of

SCHEMA: Final = "key binary, place long, id binary, time_us long, line binary, reason string"
NAMES: Final = ["key", "place", "id", "time_us", "line", "reason"]
FILES_MAX: Final = 1 << 20
OFFSET_MAX: Final = 1 << 40
_OFFSET_BITS: Final = 40
_KIND_BITS: Final = 60

_FILTER_BITS_AN_ID: Final = 32
"""One of so many primaries that nobody names is kept."""
_FILTER_LOG2_MIN, _FILTER_LOG2_MAX = 16, 31  # up to 256 MiB, mapped, not copied


class Kind(IntEnum):
    """What a row is, in the order in which a bucket's come."""

    PRIMARY = 0
    PRIMARY_COUNT = 1
    PRIMARY_MALFORMED = 2
    FOREIGN = 3
    FOREIGN_MALFORMED = 4


def place_of(kind: Kind, file: int, offset: int) -> int:
    return kind << _KIND_BITS | file << _OFFSET_BITS | offset


def kinds_of(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """N places -> N kinds."""
    return places >> _KIND_BITS


def file_and_offset(place: int) -> tuple[int, int]:
    return place >> _OFFSET_BITS & (FILES_MAX - 1), place & (OFFSET_MAX - 1)


def local_rows(
    session: SparkSession,
    files: Sequence[LogFile],
    settings: Settings,
    key: bytes,
    foreign: bool,
    needed: str = "",
) -> DataFrame:
    """`needed`: of primary logs, the filter."""
    rows = _foreign_rows if foreign else _primary_rows(needed)

    def work(ranges: list[Range]) -> Iterator[Any]:
        for file, start, batch in _parsed(ranges, settings, key, foreign):
            yield from rows(file, start, batch)

    return run(session, plan(session, files), work, SCHEMA)


def in_buckets(rows: DataFrame, buckets: int) -> DataFrame:
    """Each bucket a partition, sorted by place, with the column `bucket`: the same in every attempt."""
    # By the key again, not by the partition: the task compares the two.
    bucket = F.pmod(F.hash("key"), F.lit(buckets))
    return rows.repartition(buckets, "key").withColumn("bucket", bucket).sortWithinPartitions("place")


Rows = Callable[[LogFile, int, Any], Iterator[Any]]
"""(log, offset of the chunk, what the parser made of it) -> record batches."""


def _parsed(
    ranges: Sequence[Range], settings: Settings, key: bytes, foreign: bool
) -> Iterator[tuple[LogFile, int, Any]]:
    parser = ChunkParser(settings, key, foreign)
    for one in ranges:
        for path, chunk in chunks_of(one, settings.logs, unended=True):
            yield one.file, chunk.start, parser.batch(path, chunk)


def _foreign_rows(file: LogFile, start: int, batch: Any) -> Iterator[Any]:
    if batch.lines:
        yield pa.RecordBatch.from_arrays(
            [
                fixed_binary(batch.primary_ids),
                pa.array(batch.starts + start + place_of(Kind.FOREIGN, file.number, 0)),
                fixed_binary(batch.ids),
                pa.array(np.frombuffer(batch.times, "<i8")),
                pa.array(batch.lines, pa.binary()),
                pa.nulls(len(batch.lines), pa.string()),
            ],
            names=NAMES,
        )
    yield from _malformed_rows(Kind.FOREIGN_MALFORMED, file, start, batch.malformed)


def _primary_rows(needed: str) -> Rows:
    def rows(file: LogFile, start: int, batch: Any) -> Iterator[Any]:
        if batch.lines:
            events = len(batch.lines)
            count_place = place_of(Kind.PRIMARY_COUNT, file.number, start + int(batch.starts[0]))
            yield rows_of_others([count_place], [events], [b""], [None])
            kept = np.flatnonzero(may_be_in(np.memmap(needed, np.uint8, "r"), hash_ids(batch.ids)))
            if len(kept):
                yield pa.RecordBatch.from_arrays(
                    [
                        fixed_binary(take_ids(batch.ids, kept)),
                        pa.array(batch.starts[kept] + start + place_of(Kind.PRIMARY, file.number, 0)),
                        pa.nulls(len(kept), pa.binary()),
                        pa.nulls(len(kept), pa.int64()),
                        pa.array(list(map(batch.lines.__getitem__, kept.tolist())), pa.binary()),
                        pa.nulls(len(kept), pa.string()),
                    ],
                    names=NAMES,
                )
        yield from _malformed_rows(Kind.PRIMARY_MALFORMED, file, start, batch.malformed)

    return rows


def _malformed_rows(kind: Kind, file: LogFile, start: int, malformed: Sequence[Malformed]) -> Iterator[Any]:
    if malformed:
        places = [place_of(kind, file.number, start + bad.start) for bad in malformed]
        none = [None] * len(places)
        yield rows_of_others(places, none, [bad.line for bad in malformed], [bad.reason for bad in malformed])


def rows_of_others(
    places: list[int], numbers: Sequence[int | None], lines: list[bytes], reasons: Sequence[str | None]
) -> Any:
    """Rows that are no events: anywhere, but in the same bucket each time."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([place.to_bytes(ID_BYTES, "big") for place in places], pa.binary()),
            pa.array(places, pa.int64()),
            pa.nulls(len(places), pa.binary()),
            pa.array(numbers, pa.int64()),
            pa.array(lines, pa.binary()),
            pa.array(reasons, pa.string()),
        ],
        names=NAMES,
    )


# --- the filter of primaries


def local_hashes(
    session: SparkSession, files: Sequence[LogFile], settings: Settings, key: bytes, scratch: str
) -> DataFrame:
    """As write_hashes tells them, of the primary ids that foreign events name: a file a task."""

    def work(ranges: list[Range]) -> Iterator[Any]:
        parsed = _parsed(ranges, settings, key, True)
        yield write_hashes([hash_ids(batch.primary_ids) for _, _, batch in parsed], scratch)

    return run(session, plan(session, files), work, "name string, hashes long")


def write_hashes(found: Sequence[npt.NDArray[np.uint64]], scratch: str) -> Any:
    """A file of distinct hashes -> its name, and how many."""
    hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *found]))
    name = f"{scratch}/hashes-{uuid4().hex}"
    hashes.tofile(name)
    return pa.RecordBatch.from_pydict({"name": [name], "hashes": [len(hashes)]})


def write_filter(hashes: DataFrame, scratch: Path) -> str:
    """A file of bits: one is set for each of the hashes."""
    made = hashes.collect()
    path = scratch / f"needed-{uuid4().hex}"
    _filter_of([row.name for row in made], sum(row.hashes for row in made)).tofile(path)
    for row in made:
        Path(row.name).unlink(missing_ok=True)
    return str(path)


def _filter_of(names: Sequence[str], hashes: int) -> npt.NDArray[np.uint8]:
    log2 = max(1, hashes * _FILTER_BITS_AN_ID).bit_length()
    bits = np.zeros(1 << min(max(log2, _FILTER_LOG2_MIN), _FILTER_LOG2_MAX) >> 3, np.uint8)
    for name in names:
        places = _bits_of(bits, np.fromfile(name, np.uint64))
        np.bitwise_or.at(bits, places >> np.uint64(3), _masks(places))
    return bits


def may_be_in(bits: npt.NDArray[np.uint8], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    places = _bits_of(bits, hashes)
    found: npt.NDArray[np.bool_] = (bits[places >> np.uint64(3)] & _masks(places)) != 0
    return found


def _bits_of(bits: npt.NDArray[np.uint8], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The high bits of each hash: its place."""
    return hashes >> np.uint64(64 - (len(bits).bit_length() + 2))


def _masks(places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8), dtype=np.uint8)
