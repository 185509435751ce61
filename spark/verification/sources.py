"""What verification reads, as DataFrames of the facts of spark.verification.facts.

Local files are read by the executors' Python in byte ranges, what has a URI by Spark's own means.

And which ids the registry does not hold, asked by Lookup (paper 2.1): a scan can't say it of events that were
joined after it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from photon.core.columns import take_ids, take_times
from photon.core.errors import UnavailableError
from photon.core.fates import Registered
from photon.core.ids import ID_BYTES
from photon.core.settings import Settings
from photon.logs.files import Chunk
from spark.engine.session import map_in_arrow
from spark.reading.events import for_joined, parsed, parsed_joined
from spark.reading.parsing import Parser
from spark.registered import ASK_TIMEOUT_S
from spark.verification.facts import (
    FOREIGN_FACTS,
    FORMS,
    JOINED_FACTS,
    LETTER_FACTS,
    PRIMARY_FACTS,
    PRIMARY_RAW,
    ForeignFacts,
    JoinedFacts,
    LetterFacts,
    PrimaryFacts,
    forms,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from idregistry.client import RegistryAt, RegistryClient


BATCH_IDS_MAX: Final = 8192
ROUNDS: Final = 3
"""A replica that is behind has caught up by the last of them."""
_PAUSE_S: Final = 0.5


def absent(events: DataFrame, registry: "RegistryAt") -> DataFrame:
    """key, time_us -> the keys of which every replica that answers says, again and again, that they are not
    registered. One that it has forgotten is none of them. A job fails with UnavailableError if none answers.
    """
    return map_in_arrow(events.select("key", "time_us"), _asker(registry), "key binary")


def _asker(
    registry: "RegistryAt",
) -> "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    def ask(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        from spark.reading.parsing import fixed_binary

        # Each replica by itself: a client of all would ask the nearest one only.
        replicas = [replace(registry, addresses=(address,)) for address in registry.addresses]
        with ExitStack() as held:
            clients: list[RegistryClient] = []
            for batch in batches:
                clients = clients or [held.enter_context(one.client(ASK_TIMEOUT_S)) for one in replicas]
                for low in range(0, batch.num_rows, BATCH_IDS_MAX):
                    part = batch.slice(low, BATCH_IDS_MAX)
                    ids = b"".join(part.column(0).to_pylist())
                    times = part.column(1).to_numpy().astype("<i8").tobytes()
                    yield pa.RecordBatch.from_pydict({"key": fixed_binary(_absent(clients, ids, times))})

    return ask


def _absent(clients: "Sequence[RegistryClient]", ids: bytes, times: bytes) -> bytes:
    """The ids that are left when all were asked."""
    for turn in range(ROUNDS):
        if turn:
            time.sleep(_PAUSE_S)
        silent: UnavailableError | None = None
        answers = 0
        for client in clients:
            if not ids:
                return b""
            try:
                outcomes = np.frombuffer(client.lookup(ids, times), np.uint8)
            except UnavailableError as error:
                silent = error
                continue
            answers += 1
            rows = outcomes == Registered.ABSENT
            ids, times = take_ids(ids, rows), take_times(times, rows)
        if not answers and silent is not None:
            raise silent
    assert len(ids) % ID_BYTES == 0
    return ids


Rows = Callable[[bytes], Any]


# --- logs


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
