"""Joined logs as DataFrames of what a parser makes of their lines: files of lines, and of Parquet
(joiner.parquet), whose rows are made lines again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from joiner.joined_lines import parquet_lines
from joiner.output_files import PARQUET
from photon.core.chunks import Chunk
from photon.core.settings import Settings
from spark.engine.arrow import map_in_arrow
from spark.reading.events import log_files, parsed, run
from spark.reading.parsing import Parser

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
