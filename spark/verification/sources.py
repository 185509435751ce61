"""What verification reads, as DataFrames of the facts of spark.verification.facts.

Local files are read by the executors' Python in byte ranges, what has a URI by Spark's own means.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from photon.core.chunks import Chunk
from photon.core.settings import Settings
from spark.engine.arrow import map_in_arrow
from spark.reading.contents import FORMS, forms
from spark.reading.events import parsed
from spark.reading.joined import for_joined, parsed_joined
from spark.reading.parsing import Parser
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

Rows = Callable[[bytes], Any]


class _FactParser:
    """Chunks to the facts of their lines. A line that is too long counts as one that is no event."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def columns(self, name: str, path: str, chunk: Chunk) -> list[Any]:
        return [self._rows(b"{\n" if chunk.oversized else chunk.data)]


def foreign_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> id, key (its 16 bytes), primary (16 bytes), time_us; all null for a malformed line."""

    def make() -> Parser:
        return _FactParser(ForeignFacts(settings).rows)

    return parsed(session, paths, settings, make, FOREIGN_FACTS, unended=True)


def primary_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary (16 bytes), content (a digest of the line). Malformed ones are left out."""

    def make() -> Parser:
        return _FactParser(PrimaryFacts(settings).rows)

    return parsed(session, paths, settings, make, PRIMARY_FACTS, unended=True)


def primary_lines(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """As primary_events, with raw, the line."""

    def make() -> Parser:
        return _FactParser(PrimaryFacts(settings).raw_rows)

    return parsed(session, paths, settings, make, PRIMARY_RAW, unended=True)


def joined_events(
    session: SparkSession, paths: Sequence[str], settings: Settings, digests: bool = True
) -> DataFrame:
    """-> id, key, primary and content of the primary object inside (null: none), time_us (null: not told).

    `id` and `key` are null for a line that can't be read. A last line without its newline is none yet.
    """

    def make() -> Parser:
        return _FactParser(JoinedFacts(settings, digests).rows)

    return parsed_joined(session, paths, settings, make, JOINED_FACTS, unended=False)


def joined_primaries(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary, content, raw, loosely (it is from Parquet) of the primary objects inside joined lines."""

    def make(loosely: bool = False) -> Parser:
        rows = partial(JoinedFacts(settings).raw_rows, loosely=loosely)
        return _FactParser(rows)

    return parsed_joined(session, paths, settings, make, PRIMARY_RAW, False, partial(make, True))


def canonical_forms(lines: DataFrame) -> DataFrame:
    """Of primary_lines or joined_primaries -> primary, content, forms: digests that are the same for the same
    object, however it is written."""
    return map_in_arrow(lines.select("primary", "content", "raw", "loosely"), forms, FORMS)


def dead_letters(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """Letters of foreign events -> id, key, time_us, fate. `key` is null for one that can't be read."""
    foreign = [path for path in paths if not path.rpartition("/")[2].startswith("primary-")]

    def make() -> Parser:
        return _FactParser(LetterFacts(settings).rows)

    return parsed(session, foreign, for_joined(settings), make, LETTER_FACTS, unended=False)
