"""The log file map as Spark jobs: log lines -> runs and opaque ids -> sorted parts (paper 3.4.2).

One pass over the logs makes rows of four kinds:

    RUN      id: server key (8), a and b: earliest and latest event time (us), c and d: start and end
    OPAQUE   id (16), a: start, b: length
    LETTER   a: start, text: a malformed line as a dead letter
    FACT     of a range that was read. text: packed Facts

Sorted rows become the map's files, a partition each, on the executors. Every attempt gives its files new
names: the driver lists those of the attempts that counted.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from eventstore.built_map import write_durably, write_sparse
from eventstore.rules.entries import LEVEL_PARTS, Interval, Runs, levels_of, records_of, runs_of
from eventstore.segments import Columns, Writer
from photon.core.columns import take_ids
from photon.core.fates import Fate
from photon.core.ids import opaque_mask
from photon.core.settings import Settings
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, Chunk, digest, read_at
from photon.logs.formats import Malformed, PrimaryBatch
from photon.logs.writer import DeadLetter, dead_letter_lines
from spark.reading.events import plan, run
from spark.reading.lines import ChunkParser, LogFile, Range, chunks_of, fixed_binary
from spark.session import map_in_arrow

PART_SCHEMA: Final = "name string, entries long, level int, part int"
"""Of what was written; files go in the order of level and part."""


def write_sparse_parts(rows: DataFrame, parts: int, interval: Interval, directory: Path) -> DataFrame:
    """The runs of each cell of the grid made one, range-partitioned and sorted as the map's keys are."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_records(batch) for batch in batches if batch.num_rows]
        if not found:
            return
        records = np.concatenate(found)
        levels = levels_of(records, interval.us)
        for level in np.unique(levels).tolist():
            name = _name("sparse")
            part = records[levels == level]
            write_sparse(directory / name, part)
            yield _written(name, len(part), level)

    order = ["level", "id", "a", "file", "c"]
    runs = sparse(rows, interval).repartitionByRange(parts, *order).sortWithinPartitions(*order)
    return map_in_arrow(runs, write, PART_SCHEMA)


def write_dense_parts(rows: DataFrame, parts: int, directory: Path) -> DataFrame:
    """Opaque ids, range-partitioned and sorted, those of one id by their places."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_columns(batch) for batch in batches if batch.num_rows]
        count = sum(map(len, found))
        if not count:
            return
        name = _name("dense")
        writer = Writer(directory / name, count)
        for columns in found:
            writer.append(columns)
        writer.close()
        yield _written(name, count)

    opaque = rows.where(F.col("kind") == OPAQUE).select("id", "file", "a", "b")
    opaque = opaque.repartitionByRange(parts, "id").sortWithinPartitions("id", "file", "a")
    return map_in_arrow(opaque, write, PART_SCHEMA)


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


def _records(batch: Any) -> Any:
    numbers = {name: batch.column(name).to_numpy() for name in ("a", "file", "c", "b", "d")}
    return records_of(
        server=_bytes_of(batch.column("id"), ">u8"),
        earliest=numbers["a"],
        file=numbers["file"],
        start=numbers["c"],
        length=numbers["d"] - numbers["c"],
        latest=numbers["b"],
    )


def _columns(batch: Any) -> Columns:
    halves = _bytes_of(batch.column(0), ">u8").astype(np.uint64)
    file, start, length = (batch.column(n).to_numpy() for n in (1, 2, 3))
    return Columns(
        halves[0::2], halves[1::2], start.astype(np.uint64), file.astype(np.uint32), length.astype(np.uint32)
    )


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


def _written(name: str, count: int, level: int = 0) -> Any:
    numbers = {"level": pa.array([level], pa.int32()), "part": pa.array([_part()], pa.int32())}
    return pa.RecordBatch.from_pydict({"name": [name], "entries": [count], **numbers})


RUN: Final = 0
OPAQUE: Final = 1
LETTER: Final = 2
FACT: Final = 3

SCHEMA: Final = "kind int, file int, id binary, a long, b long, c long, d long, text binary"


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Of a range: its end, digests of the file's first bytes and of the last ones read; counts of events, of
    malformed lines, of rows, and of the bytes of those that are letters."""

    file: int
    end: int
    head_bytes: int
    head: bytes
    tail: bytes
    events: int
    malformed: int
    runs: int
    opaque: int
    letter_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A log of which something is new: its events at `fresh` and later. `file.start` is that, or a little
    before: where the last cells of the grid begin that it may still fill."""

    file: LogFile
    fresh: int


def rows_of(
    session: SparkSession, readings: Sequence[Reading], settings: Settings, interval: Interval
) -> DataFrame:
    """What is in the new parts of the logs, as rows of SCHEMA; of lines before what is fresh only runs."""
    fresh = {reading.file.number: reading.fresh for reading in readings}

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = ChunkParser(settings, foreign=False)
        for one in ranges:
            yield from _Rows(one, fresh[one.file.number], interval).batches(parser, settings)

    return run(session, plan(session, [reading.file for reading in readings]), work, SCHEMA)


class _Rows:
    """The rows of one range."""

    def __init__(self, one: Range, fresh: int, interval: Interval) -> None:
        self._range, self._fresh, self._interval = one, fresh, interval
        self._events = self._malformed = self._runs = self._opaque = self._letter_bytes = 0

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
        starts = batch.starts + chunk.start
        lengths = np.fromiter(map(len, batch.lines), np.int64, len(batch.lines))
        opaque = opaque_mask(batch.ids)
        if not opaque.all():
            photon = ~opaque
            files = np.full(int(photon.sum()), self._range.file.number, np.int64)
            ids = batch.ids if photon.all() else take_ids(batch.ids, photon)
            yield self._run_rows(runs_of(ids, files, starts[photon], lengths[photon], self._interval))
        fresh = starts >= self._fresh
        self._events += int(fresh.sum())
        opaque &= fresh
        if opaque.any():
            ids = batch.ids if opaque.all() else take_ids(batch.ids, opaque)
            self._opaque += int(opaque.sum())
            yield self._rows(OPAQUE, fixed_binary(ids), a=starts[opaque], b=lengths[opaque])
        letters = [bad for bad in batch.malformed if bad.start + chunk.start >= self._fresh]
        if letters:
            yield self._letter_rows(letters, chunk.start)

    def _run_rows(self, runs: Runs) -> Any:
        self._runs += len(runs)
        servers = fixed_binary(runs.server.astype(">u8").tobytes(), 8)
        return self._rows(RUN, servers, a=runs.earliest, b=runs.latest, c=runs.start, d=runs.end)

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
        counts = (self._events, self._malformed, self._runs, self._opaque, self._letter_bytes)
        return Facts(self._range.file.number, end, head_bytes, head, tail, *counts)

    def _rows(self, kind: int, ids: Any, text: list[bytes] | None = None, **numbers: Any) -> Any:
        count = len(numbers["a"])
        columns = {
            "kind": pa.repeat(pa.scalar(kind, pa.int32()), count),
            "file": pa.repeat(pa.scalar(self._range.file.number, pa.int32()), count),
            "id": pa.nulls(count, pa.binary()) if ids is None else ids,
        }
        for name in "abcd":
            given = numbers.get(name)
            columns[name] = pa.nulls(count, pa.int64()) if given is None else pa.array(given, pa.int64())
        columns["text"] = pa.nulls(count, pa.binary()) if text is None else pa.array(text, pa.binary())
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def sparse(rows: DataFrame, interval: Interval) -> DataFrame:
    """The runs of each cell of the grid, made one -> level, id, a, file, c, b, d."""
    cells = rows.where(F.col("kind") == RUN).groupBy(
        "file", "id", F.expr(f"c div {interval.bytes}"), F.expr(f"a div {interval.us}")
    )
    runs = cells.agg(
        F.min("a").alias("a"), F.max("b").alias("b"), F.min("c").alias("c"), F.max("d").alias("d")
    )
    width = F.col("b") - F.col("a")
    narrow = [(width * part <= interval.us).cast("int") for part in LEVEL_PARTS[1:]]
    level = sum(narrow[1:], start=narrow[0])
    return runs.select(level.alias("level"), "id", "a", "file", "c", "b", "d")


def facts(rows: DataFrame) -> list[Facts]:
    """Of all ranges that were read."""
    texts = rows.where(F.col("kind") == FACT).select("text").collect()
    return [msgspec.msgpack.decode(bytes(row.text), type=Facts) for row in texts]
