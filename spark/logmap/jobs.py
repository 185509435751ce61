"""The log file map as Spark jobs: log lines -> entries -> sorted segments (paper 3.4.2).

One pass over the logs makes rows of three kinds:

    ENTRY    hash: of an event's id (8, big endian), a: start, b: length of its line
    LETTER   a: start, text: a malformed line as a dead letter
    FACT     of a range that was read. text: packed Facts

Sorted rows become the map's files, a partition each, on the executors. Every attempt gives its files new
names: the driver lists those of the attempts that counted.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from eventstore.built_map import write_durably
from eventstore.rules.entries import PLACE, Entries
from eventstore.segments import Writer
from photon.core.columns import hash_ids
from photon.core.fates import Fate
from photon.core.settings import Settings
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, Chunk, digest, read_at
from photon.logs.formats import Malformed, PrimaryBatch
from photon.logs.writer import DeadLetter, dead_letter_lines
from spark.reading.events import plan, run
from spark.reading.lines import ChunkParser, LogFile, Range, chunks_of, fixed_binary
from spark.session import map_in_arrow

PART_SCHEMA: Final = "name string, entries long, part int"
"""Of what was written; files go in the order of the parts."""


def write_segments(rows: DataFrame, parts: int, directory: Path) -> DataFrame:
    """Entries, range-partitioned and sorted by their hashes, those of one hash by their places."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_entries(batch) for batch in batches if batch.num_rows]
        count = sum(map(len, found))
        if not count:
            return
        name = _name("segment")
        writer = Writer(directory / name, count)
        for entries in found:
            writer.append(entries)
        writer.close()
        yield _written(name, count)

    entries = rows.where(F.col("kind") == ENTRY).select("hash", "file", "a", "b")
    entries = entries.repartitionByRange(parts, "hash").sortWithinPartitions("hash", "file", "a")
    return map_in_arrow(entries, write, PART_SCHEMA)


def write_letters(rows: DataFrame, directory: Path) -> DataFrame:
    """Dead letters in the order of their places, as one part."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        lines = [line for batch in batches for line in batch.column(0).to_pylist()]
        if lines:
            name = f"{_name('malformed')}.jsonl"
            write_durably(directory / name, b"".join(lines))
            yield _written(name, len(lines))

    letters = rows.where(F.col("kind") == LETTER).repartition(1).sortWithinPartitions("file", "a")
    return map_in_arrow(letters.select("text"), write, PART_SCHEMA)


def _entries(batch: Any) -> Entries:
    places = np.empty(batch.num_rows, PLACE)
    for column, name in enumerate(("file", "offset", "length"), 1):
        places[name] = batch.column(column).to_numpy()
    return Entries(_bytes_of(batch.column(0), ">u8").astype(np.uint64), places)


def _bytes_of(column: Any, dtype: str) -> Any:
    """Of a binary column whose values have all one width: its bytes as numbers."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].view(dtype)


def _name(kind: str) -> str:
    return f"{kind}-{_part():05d}-{secrets.token_hex(6)}"


def _part() -> int:
    context = TaskContext.get()
    assert context is not None, "on an executor"
    return int(context.partitionId())


def _written(name: str, count: int) -> Any:
    return pa.RecordBatch.from_pydict(
        {"name": [name], "entries": [count], "part": pa.array([_part()], pa.int32())}
    )


ENTRY: Final = 0
LETTER: Final = 1
FACT: Final = 2

SCHEMA: Final = "kind int, file int, hash binary, a long, b long, text binary"


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Of a range: its end, digests of the file's first bytes and of the last ones read; counts of events and
    of malformed lines, and the bytes of their letters."""

    file: int
    end: int
    head_bytes: int
    head: bytes
    tail: bytes
    events: int
    malformed: int
    letter_bytes: int


def rows_of(session: SparkSession, files: Sequence[LogFile], settings: Settings) -> DataFrame:
    """What is in the files from their starts on, as rows of SCHEMA."""

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = ChunkParser(settings, foreign=False)
        for one in ranges:
            yield from _Rows(one).batches(parser, settings)

    return run(session, plan(session, files), work, SCHEMA)


class _Rows:
    """The rows of one range."""

    def __init__(self, one: Range) -> None:
        self._range = one
        self._events = self._malformed = self._letter_bytes = 0

    def batches(self, parser: ChunkParser, settings: Settings) -> Iterator[Any]:
        facts: Facts | None = None
        for path, chunk in chunks_of(self._range, settings.logs, unended=False):
            batch = parser.batch(path, chunk)
            assert isinstance(batch, PrimaryBatch)
            yield from self._of_chunk(batch, chunk)
            facts = self._facts(path, chunk.end)  # now: the copy of an archive goes with its last chunk
        if facts is not None:
            yield self._rows(FACT, None, [msgspec.msgpack.encode(facts)], a=[None])

    def _of_chunk(self, batch: PrimaryBatch, chunk: Chunk) -> Iterator[Any]:
        if batch.lines:
            self._events += len(batch.lines)
            lengths = np.fromiter(map(len, batch.lines), np.int64, len(batch.lines))
            hashes = fixed_binary(hash_ids(batch.ids).astype(">u8").tobytes(), 8)
            yield self._rows(ENTRY, hashes, a=batch.starts + chunk.start, b=lengths)
        if batch.malformed:
            yield self._letter_rows(batch.malformed, chunk.start)

    def _letter_rows(self, bad: Sequence[Malformed], start: int) -> Any:
        self._malformed += len(bad)
        name = self._range.file.name
        letters = [DeadLetter(Fate.MALFORMED, one.reason, one.line, name, start + one.start) for one in bad]
        lines = [dead_letter_lines([letter]) for letter in letters]
        self._letter_bytes += sum(map(len, lines))
        return self._rows(LETTER, None, a=[one.offset for one in letters], text=lines)

    def _facts(self, path: str, end: int) -> Facts:
        head_bytes, tail_bytes = min(HEAD_BYTES, end), min(TAIL_BYTES, end)
        head = digest(read_at(path, 0, head_bytes))
        tail = digest(read_at(path, end - tail_bytes, tail_bytes))
        counts = (self._events, self._malformed, self._letter_bytes)
        return Facts(self._range.file.number, end, head_bytes, head, tail, *counts)

    def _rows(self, kind: int, hashes: Any, text: list[bytes] | None = None, **numbers: Any) -> Any:
        count = len(numbers["a"])
        columns = {
            "kind": pa.repeat(pa.scalar(kind, pa.int32()), count),
            "file": pa.repeat(pa.scalar(self._range.file.number, pa.int32()), count),
            "hash": pa.nulls(count, pa.binary()) if hashes is None else hashes,
        }
        for name in "ab":
            given = numbers.get(name)
            columns[name] = pa.nulls(count, pa.int64()) if given is None else pa.array(given, pa.int64())
        columns["text"] = pa.nulls(count, pa.binary()) if text is None else pa.array(text, pa.binary())
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def facts(rows: DataFrame) -> list[Facts]:
    """Of all ranges that were read."""
    texts = rows.where(F.col("kind") == FACT).select("text").collect()
    return [msgspec.msgpack.decode(bytes(row.text), type=Facts) for row in texts]
