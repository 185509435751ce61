"""Logs of a backfill that only Spark can read (s3a://, hdfs://): which there are, and their rows.

What stands behind a URI is taken to change as a whole: its size and its time tell.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from photon.core.columns import hash_ids, split_ids
from photon.core.settings import Settings
from spark.backfill.job import LogInput, escaped
from spark.backfill.rows import NAMES, SCHEMA, Kind, may_be_in, place_of, rows_of_others, write_hashes
from spark.engine.arrow import map_in_arrow
from spark.engine.session import spark_failures
from spark.reading.columns import fixed_binary
from spark.reading.events import parsed_foreign, parsed_primaries

Numbers = Mapping[str, int]
"""URIs -> numbers of logs."""


def look_at_remote(session: SparkSession, uris: Sequence[str]) -> tuple[LogInput, ...]:
    """The files that URIs name now, in the order of their names. SparkFailedError."""
    with spark_failures():
        files = session.read.format("binaryFile").load(list(uris))
        changed_us = F.unix_micros("modificationTime").alias("changed_us")
        told = files.select("path", "length", changed_us).collect()
    return tuple(LogInput(row.path, row.length, str(row.changed_us)) for row in sorted(told))


def remote_rows(
    session: SparkSession, logs: Numbers, settings: Settings, key: bytes, foreign: bool, needed: str
) -> DataFrame:
    """As spark.backfill.rows has them. `needed`: the filter of primaries."""
    numbers = {unquote(name): number for name, number in logs.items()}
    make = _foreign if foreign else _primaries(needed)
    kind = Kind.FOREIGN_MALFORMED if foreign else Kind.PRIMARY_MALFORMED

    def rows(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if batch.num_rows:
                malformed = pc.is_valid(batch.column("reason"))
                events, bad = batch.filter(pc.invert(malformed)), batch.filter(malformed)
                if events.num_rows:
                    yield from make(events, _files(events, numbers))
                if bad.num_rows:
                    places = _places(kind, bad, _files(bad, numbers)).tolist()
                    lines, reasons = bad.column("line").to_pylist(), bad.column("reason").to_pylist()
                    yield rows_of_others(places, [None] * len(places), lines, reasons)

    return map_in_arrow(_parsed(session, logs, settings, key, foreign), rows, SCHEMA)


def remote_hashes(
    session: SparkSession, logs: Numbers, settings: Settings, key: bytes, scratch: str
) -> DataFrame:
    """As spark.backfill.rows.write_hashes tells them, of the primary ids that are named."""

    def hashes(batches: Iterable[Any]) -> Iterator[Any]:
        ids = (batch.column("primary_id").drop_null().to_pylist() for batch in batches)
        yield write_hashes([hash_ids(b"".join(some)) for some in ids], scratch)

    parsed = _parsed(session, logs, settings, key, True).select("primary_id")
    return map_in_arrow(parsed, hashes, "name string, hashes long")


def _parsed(session: SparkSession, logs: Numbers, settings: Settings, key: bytes, foreign: bool) -> DataFrame:
    read = parsed_foreign if foreign else parsed_primaries
    return read(session, [escaped(name) for name in logs], settings, key, unended=True)


def _files(batch: Any, numbers: Numbers) -> Any:
    """Each row's number of its log."""
    paths = batch.column("path").dictionary_encode()
    known = [numbers[unquote(path)] for path in paths.dictionary.to_pylist()]
    return np.array(known, np.int64)[paths.indices.to_numpy()]


def _places(kind: Kind, batch: Any, files: Any) -> Any:
    return place_of(kind, 0, 0) + files * place_of(Kind.PRIMARY, 1, 0) + batch.column("start").to_numpy()


def _foreign(events: Any, files: Any) -> Iterator[Any]:
    columns = [
        events.column("primary_id"),
        pa.array(_places(Kind.FOREIGN, events, files)),
        events.column("id"),
        events.column("time_us"),
        events.column("line"),
        events.column("reason"),
    ]
    yield pa.RecordBatch.from_arrays(columns, names=NAMES)


def _primaries(needed: str) -> Callable[[Any, Any], Iterator[Any]]:
    def rows(events: Any, files: Any) -> Iterator[Any]:
        places = _places(Kind.PRIMARY, events, files)
        count = int(_places(Kind.PRIMARY_COUNT, events, files)[0])
        yield rows_of_others([count], [events.num_rows], [b""], [None])
        ids = b"".join(events.column("id").to_pylist())
        kept = np.flatnonzero(may_be_in(np.memmap(needed, np.uint8, "r"), hash_ids(ids)))
        if len(kept):
            few = events.take(pa.array(kept))
            chosen = b"".join(map(split_ids(ids).__getitem__, kept.tolist()))
            columns = [
                fixed_binary(chosen),
                pa.array(places[kept]),
                pa.nulls(len(kept), pa.binary()),
                pa.nulls(len(kept), pa.int64()),
                few.column("line"),
                few.column("reason"),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=NAMES)

    return rows
