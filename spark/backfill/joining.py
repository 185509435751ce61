"""The Spark part of a backfill: every bucket registered and staged, and it noted which files count.

Logs that only Spark can read (s3a://, hdfs://) are taken to change as a whole: their size and time tell.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from idregistry.client import RegistryAt
from joiner.leases import LeaseKeeper
from photon.core.columns import hash_ids, split_ids
from photon.core.disk import storage_errors, sync_directory
from photon.core.settings import Settings
from spark.backfill.bucket import BucketResult, Work, join_bucket
from spark.backfill.job import Job, LogInput, Phase, Place, check_unchanged, escaped, log_files
from spark.backfill.publishing import fenced
from spark.backfill.rows import (
    NAMES,
    SCHEMA,
    Kind,
    in_buckets,
    local_hashes,
    local_rows,
    may_be_in,
    place_of,
    rows_of_others,
    write_filter,
    write_hashes,
)
from spark.engine.session import map_in_arrow, spark_failures
from spark.reading.events import parsed_foreign, parsed_primaries
from spark.reading.parsing import fixed_binary

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


SESSION_SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",  # it might put buckets together
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",  # and so many ids a commit
}


def join_buckets(
    session: SparkSession,
    job: Job,
    place: Place,
    settings: Settings,
    registry: RegistryAt,
    keeper: LeaseKeeper,
) -> Job:
    """The job with its results, as it is durably noted. FencedError; SparkFailedError: run it again."""
    _empty(place.staging)
    work = Work(
        settings,
        registry,
        place.token_address,
        job.incarnation,
        job.begun_us,
        str(place.staging),
        tuple(log.name for log in (*job.primary, *job.foreign)),
        job.output_format == "parquet",
    )
    _send_adapter(session, settings.adapter.use)
    try:
        with spark_failures(), _settings_of(session):
            results = run(session, job, work)
    except Exception as error:
        if keeper.own.fenced:
            raise fenced(job, place) from error
        raise
    # Two attempts may have read different lines, if a log was replaced meanwhile.
    check_unchanged([*job.primary, *job.foreign], partial(look_at_remote, session))
    with storage_errors(place.staging):
        sync_directory(place.staging)
    job = msgspec.structs.replace(job, phase=Phase.JOINED, results=tuple(results))
    place.save(job)
    return job


def run(session: SparkSession, job: Job, work: Work) -> list[BucketResult]:
    """What became of each bucket that has rows, as the attempt says that Spark took."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        for result in join_bucket(batches, work):
            yield pa.RecordBatch.from_pydict({"result": [msgspec.json.encode(result).decode()]})

    rows = in_buckets(_rows(session, job, work), job.buckets)
    told = map_in_arrow(rows, task, "result string").collect()
    results = [msgspec.json.decode(row.result, type=BucketResult) for row in told]
    return sorted(results, key=lambda result: result.bucket)


def _rows(session: SparkSession, job: Job, work: Work) -> DataFrame:
    """All rows of the job, of local logs and of others."""
    settings, key = work.settings, work.settings.ids.key.encode()
    files, remote = log_files(job.foreign, len(job.primary))
    hashes = [local_hashes(session, files, settings, key, work.staging)] if files else []
    frames = [local_rows(session, files, settings, key, True)] if files else []
    if remote:
        hashes.append(remote_hashes(session, remote, settings, key, work.staging))
        frames.append(remote_rows(session, remote, settings, key, True, ""))
    needed = write_filter(reduce(DataFrame.unionByName, hashes), Path(work.staging))
    files, remote = log_files(job.primary, 0)
    if files:
        frames.append(local_rows(session, files, settings, key, False, needed))
    if remote:
        frames.append(remote_rows(session, remote, settings, key, False, needed))
    return reduce(DataFrame.unionByName, frames)


@contextmanager
def _settings_of(session: SparkSession) -> Iterator[None]:
    before = {name: session.conf.get(name, None) for name in SESSION_SETTINGS}
    for name, value in SESSION_SETTINGS.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


def _send_adapter(session: SparkSession, use: str) -> None:
    """To executors elsewhere, the module that the settings name; a package must be installed there."""
    context = session.sparkContext
    found = importlib.util.find_spec(use.partition(":")[0]) if use else None
    if found is not None and found.origin and not str(context.master).startswith("local"):
        context.addPyFile(found.origin)


def _empty(staging: Path) -> None:
    """What earlier attempts left is never published."""
    with storage_errors(staging):
        for path in staging.iterdir():
            with suppress(FileNotFoundError):
                path.unlink()
