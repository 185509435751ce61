"""Log lines with their places, parsed by Photon's own code, as DataFrames.

Local files are read by the executors' Python in byte ranges, straight into columns: a line is what
photon.logs.formats makes of it, and no row goes through the JVM before it is packed. What has a URI
(s3a://, hdfs://) Spark reads and Photon parses: lines come from Spark's text source, which unpacks .gz;
what it can't take apart (.zst) comes a whole file at a time, of 2 GiB at most. A byte order mark at
a file's start is not seen there: places are 3 bytes less.

Joined logs are read alike: files of lines, and of Parquet, whose rows are made lines again
(joiner.joined_lines).
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from joiner.joined_lines import parquet_lines
from joiner.output_files import PARQUET
from photon.core.settings import Settings
from photon.logs.files import Chunk
from photon.logs.packed import is_packed
from spark.engine.session import map_in_arrow
from spark.reading.parsing import FOREIGN_SCHEMA, PRIMARY_SCHEMA, ChunkParser, Parser
from spark.reading.ranges import LogFile, Range, chunks_of, is_object, local_file, split_bytes, tasks_of

# --- by Spark's own means

_OPEN_COST_BYTES: Final = 4 << 20  # smaller splits than this Spark makes only if it is told to
_SPARK_WILDCARDS: Final = re.compile(r"([\\*?\[\]{}])")

Bases = Mapping[tuple[str, int], int]
"""Path and start of a split -> where its first line begins."""


def remote_events(
    session: SparkSession,
    uris: Sequence[str],
    settings: Settings,
    make_parser: Callable[[], Parser],
    unended: bool,
    schema: str,
    split_bytes_max: int,
) -> DataFrame:
    """As spark.reading.events.parsed."""
    files = session.read.format("binaryFile").load(list(uris)).select("path", "length").collect()
    whole = [file.path for file in files if _is_whole(file.path)]
    large = min(split_bytes_max, _OPEN_COST_BYTES)
    parts = []
    if len(whole) < len(files):
        paths = [_escaped(file.path) for file in files if not _is_whole(file.path)] if whole else list(uris)
        lines = _ended_lines(session, paths)
        bases = _bases(lines) if any(file.length > large for file in files) else {}
        parse = _line_parser(make_parser, bases, settings.logs.line_bytes_max, unended)
        parts.append(map_in_arrow(lines, parse, schema))
    if whole:
        contents = session.read.format("binaryFile").load([_escaped(path) for path in whole])
        parse = _file_parser(make_parser, settings, unended)
        parts.append(map_in_arrow(contents.select("path", "content"), parse, schema))
    if not parts:
        return session.createDataFrame([], schema)
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


def _is_whole(path: str) -> bool:
    return path.endswith(".zst")


def _escaped(path: str) -> str:
    return _SPARK_WILDCARDS.sub(r"\\\1", path)


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
    """Every line is in one split and every byte in one line: a split's lines begin where those before end."""
    sums = lines.groupBy("path", "split").agg(F.sum(F.octet_length("line")).alias("bytes")).collect()
    bases: dict[tuple[str, int], int] = {}
    ends: dict[str, int] = {}
    for row in sorted(sums, key=lambda row: (row.path, row.split)):
        bases[row.path, row.split] = ends.get(row.path, 0)
        ends[row.path] = bases[row.path, row.split] + row.bytes
    return bases


def _line_parser(
    make_parser: Callable[[], Parser], bases: Bases, line_bytes_max: int, unended: bool
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def parse(batches: Iterable[Any]) -> Iterator[Any]:
        parser = make_parser()
        at, offset = ("", -1), 0
        for batch in batches:
            for low, high in _runs(batch):
                path, split = batch.column(1)[low].as_py(), batch.column(2)[low].as_py()
                if (path, split) != at:
                    at, offset = (path, split), bases.get((path, split), 0)
                size = None if is_packed(path) else batch.column(3)[low].as_py()
                name = unquote(path)
                for chunk in _chunks(batch.column(0)[low:high], offset, line_bytes_max):
                    offset = chunk.end
                    kept = chunk if size is None or offset <= size else _to_size(chunk, size, unended)
                    yield from parser.columns(name, "", kept)

    return parse


def _runs(batch: Any) -> Iterator[tuple[int, int]]:
    """The rows of one split of one file each."""
    if not batch.num_rows:
        return
    paths = batch.column(1).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    splits = batch.column(2).to_numpy(zero_copy_only=False)
    begun = np.flatnonzero((np.diff(paths) != 0) | (np.diff(splits) != 0)) + 1
    yield from zip([0, *begun.tolist()], [*begun.tolist(), batch.num_rows], strict=True)


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


def _file_parser(
    make_parser: Callable[[], Parser], settings: Settings, unended: bool
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def parse(batches: Iterable[Any]) -> Iterator[Any]:
        parser = make_parser()
        for batch in batches:
            for row in range(batch.num_rows):
                name = batch.column(0)[row].as_py()
                suffix = "".join(PurePosixPath(name).suffixes)
                with tempfile.NamedTemporaryFile(prefix="photon-log-", suffix=suffix) as copy:
                    copy.write(batch.column(1)[row].as_buffer())
                    copy.flush()
                    file = local_file(copy.name)
                    for path, chunk in chunks_of(Range(file, 0, file.size), settings.logs, unended):
                        yield from parser.columns(name, path, chunk)

    return parse


# --- logs

_ESCAPED: Final = re.compile(r"\\(.)")
_WILDCARD: Final = re.compile(r"(?<!\\)[*?\[\]{}]")
_SIZES: Final = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parsed_primaries(
    session: SparkSession, paths: Sequence[str], settings: Settings, key: bytes, unended: bool = False
) -> DataFrame:
    """-> path, start (of the line in the unpacked file), length, id (16 bytes), line, reason.

    `paths` as spark.reading.paths.input_paths makes them. `reason` is null for an event. A malformed line,
    by the judgement of photon.logs.formats, has no id; of one longer than logs.line_bytes_max the beginning
    is kept. Blank lines are left out. `unended`: a last line without its newline is one if it is a JSON
    object, as it always is in an archive. `path` is a local name, or a URI where Spark reads.

    Local files are read as far as they go now, in every job of the DataFrame.
    """
    make = partial(ChunkParser, settings, key, foreign=False)
    return parsed(session, paths, settings, make, PRIMARY_SCHEMA, unended)


def parsed_foreign(
    session: SparkSession, paths: Sequence[str], settings: Settings, key: bytes, unended: bool = False
) -> DataFrame:
    """-> path, start, length, id, primary_id (16 bytes), time_us, line, reason. As parsed_primaries."""
    make = partial(ChunkParser, settings, key, foreign=True)
    return parsed(session, paths, settings, make, FOREIGN_SCHEMA, unended)


def log_files(paths: Sequence[str]) -> tuple[list[LogFile], list[str]]:
    """Those that Python reads, as they are now; and the rest, which are Spark's. StorageError."""
    local = [path for path in paths if path.startswith("file:///") and not _WILDCARD.search(path)]
    files = [local_file(_ESCAPED.sub(r"\1", path.removeprefix("file://"))) for path in local]
    known = set(local)
    return files, [path for path in paths if path not in known]


def plan(session: SparkSession, files: Sequence[LogFile]) -> list[list[Range]]:
    """What each task reads: spark.sql.files.maxPartitionBytes, or less."""
    most = split_bytes_max(session)
    return tasks_of(files, split_bytes(files, most, session.sparkContext.defaultParallelism))


def run(
    session: SparkSession, planned: Sequence[Any], work: Callable[[Any], Iterator[Any]], schema: str
) -> DataFrame:
    """A task for each that is planned; `work` makes record batches of it, on the executors."""
    if not planned:
        return session.createDataFrame([], schema)
    plans = list(planned)

    def batches(numbers: Iterable[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from work(plans[number])

    return map_in_arrow(session.range(0, len(plans), 1, len(plans)).toDF("task"), batches, schema)


def split_bytes_max(session: SparkSession) -> int:
    """As Spark's setting says it: 128m, 134217728b, 134217728."""
    text = session.conf.get("spark.sql.files.maxPartitionBytes") or "128m"
    found = re.fullmatch(r"(\d+)([bkmgt]?)b?", text.strip().lower())
    assert found is not None, "Spark has checked it"
    return int(found[1]) * _SIZES[found[2] or "b"]


def parsed(
    session: SparkSession,
    paths: Sequence[str],
    settings: Settings,
    make: Callable[[], Parser],
    schema: str,
    unended: bool,
) -> DataFrame:
    """What parsers make of the files, `schema`; one is made for each task. `unended` as parsed_primaries."""
    files, uris = log_files(paths)

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = make()
        for one in ranges:
            for path, chunk in chunks_of(one, settings.logs, unended):
                yield from parser.columns(one.file.name, path, chunk)

    read = run(session, plan(session, files), work, schema)
    if not uris:
        return read
    remote = remote_events(session, uris, settings, make, unended, schema, split_bytes_max(session))
    return remote if not files else read.unionByName(remote)


# --- joined logs

_LINE_BYTES_MAX: Final = 128 << 20
"""A primary and a foreign event, each of the longest line, and what an adapter adds."""


def for_joined(settings: Settings) -> Settings:
    """With lines as long as joined ones may be."""
    return replace(settings, logs=replace(settings.logs, line_bytes_max=_LINE_BYTES_MAX))


def parsed_joined(
    session: SparkSession,
    paths: Sequence[str],
    settings: Settings,
    make: Callable[[], Parser],
    schema: str,
    unended: bool,
    make_for_parquet: Callable[[], Parser] | None = None,
) -> DataFrame:
    """Of all files, as they are now, `schema`. Of lines any number of tasks, of Parquet one each."""
    lines = [path for path in paths if not path.endswith(PARQUET)]
    tables = [path for path in paths if path.endswith(PARQUET)]
    found = parsed(session, lines, for_joined(settings), make, schema, unended)
    if not tables:
        return found
    files, uris = log_files(tables)
    make = make_for_parquet or make

    def work(name: str) -> Iterator[Any]:
        yield from _batches(make(), name)

    found = found.unionByName(run(session, [file.name for file in files], work, schema))
    return found.unionByName(_remote(session, uris, make, schema)) if uris else found


def _remote(session: SparkSession, uris: Sequence[str], make: Callable[[], Parser], schema: str) -> DataFrame:
    def parse(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        parser = make()
        for batch in batches:
            for row in range(batch.num_rows):
                yield from _batches(parser, pa.BufferReader(batch.column(0)[row].as_buffer()))

    contents = session.read.format("binaryFile").load(list(uris)).select("content")
    return map_in_arrow(contents, parse, schema)


def _batches(parser: Parser, source: Any) -> Iterator[Any]:
    for data in parquet_lines(source):
        yield from parser.columns("", "", Chunk(0, len(data), data))
