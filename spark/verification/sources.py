"""What verification reads, as DataFrames of the facts of spark.verification.facts.

Local files are read by the executors' Python in byte ranges, what has a URI by Spark's own means.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame, SparkSession

from photon.core.chunks import Chunk
from photon.core.columns import join_lines
from photon.core.formats import Formats
from photon.core.framing import holds_blocks
from photon.core.ids import IdPacker
from photon.core.settings import Settings
from spark.engine.arrow import map_in_arrow
from spark.reading.contents import FORMS, forms, parquet_lines
from spark.reading.events import log_files, plan, run, split_bytes_max
from spark.reading.range_reading import chunks_of
from spark.reading.ranges import Range
from spark.reading.remote_reading import remote_events
from spark.verification.facts import (
    FOREIGN_FACTS,
    JOINED_FACTS,
    LETTER_FACTS,
    PRIMARY_FACTS,
    PRIMARY_RAW,
    ForeignFacts,
    JoinedFacts,
    LetterFacts,
    PrimaryFacts,
)

_JOINED_LINE_BYTES_MAX: Final = 128 << 20
"""A primary and a foreign event, each of the longest line, and what an adapter adds."""
_PARQUET: Final = ".parquet"

Rows = Callable[[bytes], Any]


class _Parser(Protocol):
    def columns(self, name: str, path: str, chunk: Chunk) -> list[Any]: ...


class _FactParser:
    """Chunks of any format to the facts of their lines. A line that is too long, or a damaged block, counts
    as one that is no event."""

    def __init__(self, settings: Settings, rows: Rows, foreign: bool) -> None:
        self._rows = rows
        self._foreign = foreign
        self._formats = Formats(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode()))

    def columns(self, name: str, path: str, chunk: Chunk) -> list[Any]:
        if chunk.oversized:
            return self._strange(1)
        if not holds_blocks(name):
            return [self._rows(chunk.data)]
        blocks = self._formats.blocks
        batch = blocks.parse_foreign(chunk.data) if self._foreign else blocks.parse_primary(chunk.data)
        return [self._rows(join_lines(batch.lines)), *self._strange(len(batch.malformed))]

    def _strange(self, count: int) -> list[Any]:
        return [self._rows(b"{\n" * count)] if count else []


def foreign_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> id, key (its 16 bytes), primary (16 bytes), time_us; all null for a malformed line."""

    def make() -> _Parser:
        return _FactParser(settings, ForeignFacts(settings).rows, foreign=True)

    return _facts(session, paths, settings, make, FOREIGN_FACTS, unended=True)


def primary_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary (16 bytes), content (a digest of the line). Malformed ones are left out."""

    def make() -> _Parser:
        return _FactParser(settings, PrimaryFacts(settings).rows, foreign=False)

    return _facts(session, paths, settings, make, PRIMARY_FACTS, unended=True)


def primary_lines(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """As primary_events, with raw, the line."""

    def make() -> _Parser:
        return _FactParser(settings, PrimaryFacts(settings).raw_rows, foreign=False)

    return _facts(session, paths, settings, make, PRIMARY_RAW, unended=True)


def joined_events(
    session: SparkSession, paths: Sequence[str], settings: Settings, digests: bool = True
) -> DataFrame:
    """-> id, key, primary and content of the primary object inside (null: none), time_us (null: not told).

    `id` and `key` are null for a line that can't be read. A last line without its newline is none yet.
    """
    settings = _for_joined(settings)

    def make() -> _Parser:
        return _FactParser(settings, JoinedFacts(settings, digests).rows, foreign=True)

    return _joined(session, paths, settings, make, JOINED_FACTS)


def joined_primaries(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary, content, raw, loosely (it is from Parquet) of the primary objects inside joined lines."""
    settings = _for_joined(settings)

    def make(loosely: bool = False) -> _Parser:
        rows = partial(JoinedFacts(settings).raw_rows, loosely=loosely)
        return _FactParser(settings, rows, foreign=True)

    return _joined(session, paths, settings, make, PRIMARY_RAW, partial(make, True))


def canonical_forms(lines: DataFrame) -> DataFrame:
    """Of primary_lines or joined_primaries -> primary, content, forms: digests that are the same for the same
    object, however it is written."""
    return map_in_arrow(lines.select("primary", "content", "raw", "loosely"), forms, FORMS)


def dead_letters(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """Letters of foreign events -> id, key, time_us, fate. `key` is null for one that can't be read."""
    settings = _for_joined(settings)
    foreign = [path for path in paths if not path.rpartition("/")[2].startswith("primary-")]

    def make() -> _Parser:
        return _FactParser(settings, LetterFacts(settings).rows, foreign=True)

    return _facts(session, foreign, settings, make, LETTER_FACTS, unended=False)


def _for_joined(settings: Settings) -> Settings:
    return replace(settings, logs=replace(settings.logs, line_bytes_max=_JOINED_LINE_BYTES_MAX))


def _facts(
    session: SparkSession,
    paths: Sequence[str],
    settings: Settings,
    make: Callable[[], _Parser],
    schema: str,
    unended: bool,
) -> DataFrame:
    files, uris = log_files(paths)

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = make()
        for one in ranges:
            for path, chunk in chunks_of(one, settings.logs, unended):
                yield from parser.columns(one.file.name, path, chunk)

    local = run(session, plan(session, files), work, schema)
    if not uris:
        return local
    most = split_bytes_max(session)
    remote = remote_events(session, uris, settings, make, unended, schema, most)  # type: ignore[arg-type]
    return local.unionByName(remote) if files else remote


def _joined(
    session: SparkSession,
    paths: Sequence[str],
    settings: Settings,
    make: Callable[[], _Parser],
    schema: str,
    make_for_parquet: Callable[[], _Parser] | None = None,
) -> DataFrame:
    """Of files of lines, and of Parquet (joiner.parquet), whose rows are made lines again."""
    lines = [path for path in paths if not path.endswith(_PARQUET)]
    parquet = [path for path in paths if path.endswith(_PARQUET)]
    found = _facts(session, lines, settings, make, schema, unended=False)
    if not parquet:
        return found
    files, uris = log_files(parquet)
    make = make_for_parquet or make

    def work(name: str) -> Iterator[Any]:
        parser = make()
        for data in parquet_lines(name):
            yield from parser.columns("", "", Chunk(0, len(data), data))

    found = found.unionByName(run(session, [file.name for file in files], work, schema))
    return found.unionByName(_remote_parquet(session, uris, make, schema)) if uris else found


def _remote_parquet(
    session: SparkSession, uris: Sequence[str], make: Callable[[], _Parser], schema: str
) -> DataFrame:
    def parse(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        parser = make()
        for batch in batches:
            for row in range(batch.num_rows):
                for data in parquet_lines(pa.BufferReader(batch.column(0)[row].as_buffer())):
                    yield from parser.columns("", "", Chunk(0, len(data), data))

    contents = session.read.format("binaryFile").load(list(uris)).select("content")
    return map_in_arrow(contents, parse, schema)
