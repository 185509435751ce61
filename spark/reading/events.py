"""Logs as DataFrames: each line parsed by Photon's own code, with the place where it stands.

The executors' Python reads local files in byte ranges, straight into columns: a line is what
photon.logs.formats makes of it, and no row passes the JVM before it is packed. Spark reads what has a URI
(s3a://, hdfs://), and Photon parses it: lines come from Spark's text source, which unpacks .gz; what it can't
split (.zst) comes as whole files of at most 2 GiB. Spark drops a byte order mark at a file's start: there,
places are 3 bytes less.

Joined logs are read alike, as files of lines or of Parquet, whose rows become lines again
(joiner.joined_lines).
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from photon.logs.files import Chunk, is_object
from photon.logs.packed import is_packed
from spark.reading.lines import (
    LogFile,
    LogSet,
    Range,
    chunks_of,
    local_file,
    log_files,
    rows_of_parquet,
    rows_of_ranges,
    split_bytes,
    tasks_of,
)
from spark.reading.paths import escaped
from spark.session import map_in_arrow

_OPEN_COST_BYTES: Final = 4 << 20  # Spark makes smaller splits only if its settings say so


def parsed(session: SparkSession, logs: LogSet, schema: str | StructType) -> DataFrame:
    """What becomes of the lines of logs, as rows of `schema`.

    Blank lines are left out. Every job reads local files to where they ended when this was called; any number
    of tasks reads a file of lines, one a file of Parquet. StorageError.
    """
    lines, tables = logs.apart()
    files, uris = log_files(lines.paths)
    found = parsed_logs(session, files, replace(lines, paths=uris), schema)
    if not tables.paths:
        return found
    files, uris = log_files(tables.paths)
    found = found.unionByName(
        run(session, [file.name for file in files], partial(rows_of_parquet, tables), schema)
    )
    if not uris:
        return found

    def of_contents(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for content in batch.column(0):
                yield from rows_of_parquet(tables, pa.BufferReader(content.as_buffer()))

    return found.unionByName(map_in_arrow(_contents(session, uris).select("content"), of_contents, schema))


def parsed_logs(
    session: SparkSession, files: Sequence[LogFile], remote: LogSet, schema: str | StructType
) -> DataFrame:
    """As `parsed`, of lines: local files, and the paths of `remote`, which Spark reads."""
    read = run(session, plan(session, files), partial(rows_of_ranges, remote), schema)
    if not remote.paths:
        return read
    by_spark = _read_by_spark(session, remote, schema)
    return read.unionByName(by_spark) if files else by_spark


def plan(session: SparkSession, files: Sequence[LogFile]) -> list[list[Range]]:
    """What each task reads: spark.sql.files.maxPartitionBytes, or less."""
    parallelism = session.sparkContext.defaultParallelism
    return tasks_of(files, split_bytes(files, _split_bytes_max(session), parallelism))


def run(
    session: SparkSession,
    planned: Sequence[Any],
    work: Callable[[Any], Iterator[Any]],
    schema: str | StructType,
) -> DataFrame:
    """A task for each item of the plan; `work` makes record batches of it, on the executors."""
    if not planned:
        return session.createDataFrame([], schema)
    plans = list(planned)

    def batches(numbers: Iterable[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from work(plans[number])

    return map_in_arrow(session.range(0, len(plans), 1, len(plans)).toDF("task"), batches, schema)


def _split_bytes_max(session: SparkSession) -> int:
    """Spark's setting spark.sql.files.maxPartitionBytes, whatever unit it is given in."""
    inner: Any = session
    return int(inner._jsparkSession.sessionState().conf().filesMaxPartitionBytes())


def _contents(session: SparkSession, paths: Sequence[str]) -> DataFrame:
    return session.read.format("binaryFile").load(list(paths))


def _read_by_spark(session: SparkSession, logs: LogSet, schema: str | StructType) -> DataFrame:
    files = _contents(session, logs.paths).select("path", "length").collect()
    whole = [file.path for file in files if file.path.endswith(".zst")]
    large = min(_split_bytes_max(session), _OPEN_COST_BYTES)
    parts = []
    if len(whole) < len(files):
        split = [escaped(file.path) for file in files if file.path not in whole] if whole else logs.paths
        lines = _ended_lines(session, split)
        bases = _bases(lines) if any(file.length > large for file in files) else {}
        parts.append(map_in_arrow(lines, _of_lines(logs, bases), schema))
    if whole:
        contents = _contents(session, list(map(escaped, whole))).select("path", "content")
        parts.append(map_in_arrow(contents, _of_whole_files(logs), schema))
    if not parts:
        return session.createDataFrame([], schema)
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


def _ended_lines(session: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Each with a newline, so that a batch's column is a chunk."""
    lines = session.read.option("lineSep", "\n").text(list(paths))
    return lines.select(
        F.concat("value", F.lit("\n")).cast("binary").alias("line"),
        F.col("_metadata.file_path").alias("path"),
        F.col("_metadata.file_block_start").alias("split"),
        F.col("_metadata.file_size").alias("size"),
    )


def _bases(lines: DataFrame) -> dict[tuple[str, int], int]:
    """Path and start of a split -> where its first line begins.

    Every line is in one split and every byte in one line: a split's lines begin where those before end.
    """
    sums = lines.groupBy("path", "split").agg(F.sum(F.octet_length("line")).alias("bytes")).collect()
    bases: dict[tuple[str, int], int] = {}
    ends: dict[str, int] = {}
    for row in sorted(sums, key=lambda row: (row.path, row.split)):
        bases[row.path, row.split] = ends.get(row.path, 0)
        ends[row.path] = bases[row.path, row.split] + row.bytes
    return bases


def _of_lines(logs: LogSet, bases: Mapping[tuple[str, int], int]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def rows(batches: Iterable[Any]) -> Iterator[Any]:
        parse = logs.make()
        at, offset = ("", -1), 0
        for batch in batches:
            for low, high in _runs(batch):
                path, split = batch.column(1)[low].as_py(), batch.column(2)[low].as_py()
                if (path, split) != at:
                    at, offset = (path, split), bases.get((path, split), 0)
                size = None if is_packed(path) else batch.column(3)[low].as_py()
                for chunk in _chunks(batch.column(0)[low:high], offset, logs.settings.logs.line_bytes_max):
                    offset = chunk.end
                    kept = chunk if size is None or offset <= size else _to_size(chunk, size, logs.unended)
                    yield from parse(unquote(path), "", kept)

    return rows


def _runs(batch: Any) -> Iterator[tuple[int, int]]:
    """The rows of one split of one file each."""
    if not batch.num_rows:
        return
    paths = batch.column(1).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    splits = batch.column(2).to_numpy(zero_copy_only=False)
    begun = np.flatnonzero((np.diff(paths) != 0) | (np.diff(splits) != 0)) + 1
    yield from pairwise([0, *begun.tolist(), batch.num_rows])


def _chunks(lines: Any, offset: int, line_bytes_max: int) -> Iterator[Chunk]:
    """A column of lines that stood at `offset` -> chunks; a line that is too long comes alone."""
    ends = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1, lines.offset * 4)
    data, first = lines.buffers()[2], int(ends[0])
    long = np.flatnonzero(np.diff(ends) > line_bytes_max).tolist()
    cuts = sorted({0, len(lines), *long, *[row + 1 for row in long]})
    for low, high in pairwise(cuts):
        start, end = int(ends[low]), int(ends[high])
        oversized = low in long
        piece = data[start : min(end, start + 1024) if oversized else end].to_pybytes()
        yield Chunk(offset + start - first, offset + end - first, piece, oversized)


def _to_size(chunk: Chunk, size: int, unended: bool) -> Chunk:
    """Its last line has no newline in the file: left out, unless it counts."""
    start = chunk.data.rfind(b"\n", 0, -1) + 1
    if unended and not chunk.oversized and is_object(chunk.data[start:-1]):
        return chunk
    return Chunk(chunk.start, chunk.start + start, chunk.data[:start])


def _of_whole_files(logs: LogSet) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def rows(batches: Iterable[Any]) -> Iterator[Any]:
        parse = logs.make()
        for batch in batches:
            for row in range(batch.num_rows):
                name = batch.column(0)[row].as_py()
                suffix = "".join(PurePosixPath(name).suffixes)
                with tempfile.NamedTemporaryFile(prefix="photon-log-", suffix=suffix) as copy:
                    copy.write(batch.column(1)[row].as_buffer())
                    copy.flush()
                    file = local_file(copy.name)
                    for path, chunk in chunks_of(Range(file, 0, file.size), logs.settings.logs, logs.unended):
                        yield from parse(name, path, chunk)

    return rows
