"""The rows of a backfill: all lines of its logs that matter, brought together by the primary id.

    key binary     the primary id that a line has or names (16 bytes); of others any
    place long     kind of row, number of the log, offset of the line: rows are sorted by it, primaries first
    id, time_us    of a foreign event; `time_us` of a PRIMARY_COUNT is a number of events
    line binary
    reason string  of a malformed line

Primary lines that no foreign event names stay where they are read: a filter of one bit a hash drops them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from photon.core.columns import hash_ids, take_ids
from photon.core.ids import ID_BYTES
from photon.core.settings import Settings
from photon.logs.files import Chunk
from photon.logs.formats import Malformed
from spark.backfill.job import FILES_MAX, OFFSET_MAX, LogInput
from spark.reading.events import parsed_logs
from spark.reading.lines import ChunkParser, LogFile, LogSet, Parse, batch_of, fixed_binary
from spark.reading.paths import escaped, is_uri
from spark.session import map_in_arrow

SCHEMA: Final = pa.schema(
    {
        "key": pa.binary(),
        "place": pa.int64(),
        "id": pa.binary(),
        "time_us": pa.int64(),
        "line": pa.binary(),
        "reason": pa.string(),
    }
)
_OFFSET_BITS: Final = OFFSET_MAX.bit_length() - 1
KIND_BITS: Final = _OFFSET_BITS + FILES_MAX.bit_length() - 1

_FILTER_BITS_AN_ID: Final = 32
"""Of the primaries that nobody names, one in this many is kept."""
_FILTER_LOG2_MIN, _FILTER_LOG2_MAX = 16, 31  # up to 256 MiB, mapped, not copied


class Kind(IntEnum):
    """What a row is, in the order in which a bucket's come."""

    PRIMARY = 0
    PRIMARY_COUNT = 1
    PRIMARY_MALFORMED = 2
    FOREIGN = 3
    FOREIGN_MALFORMED = 4


def place_of(kind: Kind, file: int, offset: int) -> int:
    return kind << KIND_BITS | file << _OFFSET_BITS | offset


def file_and_offset(place: int) -> tuple[int, int]:
    return place >> _OFFSET_BITS & (FILES_MAX - 1), place & (OFFSET_MAX - 1)


def rows_of(
    session: SparkSession,
    primary: Sequence[LogInput],
    foreign: Sequence[LogInput],
    settings: Settings,
    scratch: Path,
) -> DataFrame:
    """The rows of all these logs, which are numbered from the first primary on."""

    def read(
        logs: Sequence[LogInput], first: int, make: Callable[[_Numbers], Parse], schema: str | StructType
    ) -> DataFrame:
        numbered = list(enumerate(logs, first))
        files = [LogFile(log.name, log.size, 0, number) for number, log in numbered if not is_uri(log.name)]
        uris = [escaped(log.name) for log in logs if is_uri(log.name)]
        numbers = {_known_as(log.name): number for number, log in numbered}
        return parsed_logs(
            session, files, LogSet(uris, settings, lambda: make(numbers), unended=True), schema
        )

    named = read(foreign, len(primary), lambda _: _hash_rows(settings), "hashes binary")
    needed = write_filter(named, scratch)
    schema = from_arrow_schema(SCHEMA)
    primaries = read(primary, 0, lambda numbers: primary_rows(settings, numbers, needed), schema)
    foreigns = read(foreign, len(primary), lambda numbers: foreign_rows(settings, numbers), schema)
    return primaries.unionByName(foreigns)


def in_buckets(rows: DataFrame, buckets: int) -> DataFrame:
    """Each bucket a partition, sorted by place, with the column `bucket`: the same in every attempt."""
    # By the key again, not by the partition: the task compares the two.
    bucket = F.pmod(F.hash("key"), F.lit(buckets))
    return rows.repartition(buckets, "key").withColumn("bucket", bucket).sortWithinPartitions("place")


_Numbers = Mapping[str, int]


def _known_as(name: str) -> str:
    """Spark tells URIs with and without their escapes."""
    return unquote(name) if is_uri(name) else name


def foreign_rows(settings: Settings, numbers: _Numbers) -> Parse:
    parser = ChunkParser(settings)

    def rows(name: str, path: str, chunk: Chunk) -> Iterator[Any]:
        batch, number = parser.foreign(path, chunk), numbers[_known_as(name)]
        if batch.lines:
            yield batch_of(
                SCHEMA,
                len(batch.lines),
                key=fixed_binary(batch.primary_ids),
                place=batch.starts + place_of(Kind.FOREIGN, number, chunk.start),
                id=fixed_binary(batch.ids),
                time_us=np.frombuffer(batch.times, "<i8"),
                line=batch.lines,
            )
        yield from _malformed_rows(Kind.FOREIGN_MALFORMED, number, chunk.start, batch.malformed)

    return rows


def primary_rows(settings: Settings, numbers: _Numbers, needed: str | None = None) -> Parse:
    """`needed`: a filter of the primary ids that are of use."""
    parser = ChunkParser(settings)

    def rows(name: str, path: str, chunk: Chunk) -> Iterator[Any]:
        batch, number = parser.primary(path, chunk), numbers[_known_as(name)]
        if batch.lines:
            count = place_of(Kind.PRIMARY_COUNT, number, chunk.start + int(batch.starts[0]))
            yield _others([count], time_us=[len(batch.lines)], line=[b""])
            kept = np.arange(len(batch.lines))
            if needed is not None:
                kept = np.flatnonzero(may_be_in(np.memmap(needed, np.uint8, "r"), hash_ids(batch.ids)))
            if len(kept):
                yield batch_of(
                    SCHEMA,
                    len(kept),
                    key=fixed_binary(take_ids(batch.ids, kept)),
                    place=batch.starts[kept] + place_of(Kind.PRIMARY, number, chunk.start),
                    line=list(map(batch.lines.__getitem__, kept.tolist())),
                )
        yield from _malformed_rows(Kind.PRIMARY_MALFORMED, number, chunk.start, batch.malformed)

    return rows


def _malformed_rows(kind: Kind, number: int, start: int, malformed: Sequence[Malformed]) -> Iterator[Any]:
    if malformed:
        places = [place_of(kind, number, start + bad.start) for bad in malformed]
        yield _others(places, line=[bad.line for bad in malformed], reason=[bad.reason for bad in malformed])


def _others(places: list[int], **columns: Any) -> Any:
    """Rows that are no events: in any bucket, but in the same one each time."""
    keys = [place.to_bytes(ID_BYTES, "big") for place in places]
    return batch_of(SCHEMA, len(places), key=keys, place=places, **columns)


def _hash_rows(settings: Settings) -> Parse:
    """-> hashes, the distinct ones of the primary ids that a chunk names (8 x N bytes)."""
    parser = ChunkParser(settings)

    def rows(_name: str, path: str, chunk: Chunk) -> Iterator[Any]:
        batch = parser.foreign(path, chunk)
        hashes = np.unique(hash_ids(batch.primary_ids))
        yield pa.RecordBatch.from_pydict({"hashes": [hashes.tobytes()]})

    return rows


def write_filter(named: DataFrame, scratch: Path) -> str:
    """Rows of hashes -> a file of bits: one is set for each of them."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        """A file of a partition's distinct hashes; its name, and how many."""
        found = b"".join([one for batch in batches for one in batch.column(0).to_pylist()])
        hashes = np.unique(np.frombuffer(found, np.uint64))
        name = f"{scratch}/hashes-{uuid4().hex}"
        hashes.tofile(name)
        yield pa.RecordBatch.from_pydict({"name": [name], "hashes": [len(hashes)]})

    made = map_in_arrow(named, write, "name string, hashes long").collect()
    path = scratch / f"needed-{uuid4().hex}"
    filter_of([row.name for row in made], sum(row.hashes for row in made)).tofile(path)
    for row in made:
        Path(row.name).unlink(missing_ok=True)
    return str(path)


def filter_of(names: Sequence[str], hashes: int) -> npt.NDArray[np.uint8]:
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
