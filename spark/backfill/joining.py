"""The Spark part of a backfill: every bucket registered and staged, and it noted which files count."""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from idregistry.client import RegistryAt
from joiner.lease_keeper import LeaseKeeper
from photon.core.disk import storage_errors, sync_directory
from photon.core.settings import Settings
from spark.backfill.bucket import BucketResult, Work, join_bucket
from spark.backfill.job import Job, Phase, Place, check_unchanged, log_files
from spark.backfill.publishing import fenced
from spark.backfill.remote import look_at_remote, remote_hashes, remote_rows
from spark.backfill.rows import in_buckets, local_hashes, local_rows, write_filter
from spark.engine.arrow import map_in_arrow
from spark.engine.session import spark_failures

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
