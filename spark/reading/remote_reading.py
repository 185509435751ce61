"""Log lines that Spark reads by its own means (s3a://, hdfs://, globs of its own), parsed by Photon.

Lines come from Spark's text source, which unpacks .gz; what it can't take apart (.zst) comes a whole
file at a time, of 2 GiB at most. A byte order mark at a file's start is not seen: places are 3 bytes less.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from photon.core.chunks import Chunk
from photon.core.packed import is_packed
from photon.core.settings import Settings
from spark.engine.arrow import map_in_arrow
from spark.reading.parsing import Parser
from spark.reading.range_reading import chunks_of, is_object
from spark.reading.ranges import Range, local_file

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
