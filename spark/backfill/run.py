"""`photon backfill`: the whole join of old logs as a Spark job, beside live pipelines (paper 3.3).

Rows meet by primary id in buckets. A bucket registers under one token, the same in every attempt, so that an
attempt wins again what an earlier one had won and did not write. The rows of a bucket are the same in every
attempt, because the job keeps which bytes of which logs it reads, and how. Within an attempt each id is asked
for once. So the ids of a token and the lines of the bucket's one published file are the same set, each once.

Tasks write files that nobody reads. Which attempt's file counts is settled once, by the results that the
driver gets and keeps (`Phase.JOINED`). It publishes those under the lease of the job's incarnation
(spark.backfill.publishing): without the lease recovery may release what stands in no joined log, and what is
published could be others' by then. After a driver dies, the next run of the same command goes on with the
same tokens; `--abandon` gives the job up instead.

Logs that only Spark can read (s3a://, hdfs://) are taken to change as a whole: their size and time tell.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from idregistry.client import RegistryAt, RegistryClient
from joiner.adapter import load_adapter
from joiner.leases import Lease, LeaseKeeper
from joiner.output import Checkpoint
from joiner.output_files import Life, note_life
from photon.core.clock import Clock, SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors, sync_directory
from photon.core.errors import LockedError, UsageError
from photon.core.settings import Settings, identity_digest
from spark.backfill.bucket import Work, join_bucket
from spark.backfill.job import (
    STEM,
    BucketResult,
    Job,
    LogInput,
    Phase,
    Place,
    adapter_source,
    buckets_for,
    check_registry,
    check_unchanged,
    look_at,
    reading_of,
    summary_of,
)
from spark.backfill.publishing import FIRST_LEASE_WAIT_S_MAX, Publisher, await_lease, fenced, next_number
from spark.backfill.rows import in_buckets, rows_of
from spark.reading.paths import check_name, is_uri
from spark.session import map_in_arrow, spark_failures

OpenSession = Callable[[], AbstractContextManager[SparkSession]]
Session = Callable[[], SparkSession]
Notice = Callable[[str], None]

SESSION_SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",  # it might put buckets together
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",  # ids in a commit
}
CLIENT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted. `primary`, `foreign`: globs."""

    primary: tuple[str, ...]
    foreign: tuple[str, ...]
    place: Place
    output_format: str
    registry: RegistryAt
    settings: Settings


def backfill(
    order: Order,
    open_session: OpenSession,
    notice: Notice = lambda _: None,
    checkpoint: Checkpoint = lambda _: None,
) -> dict[str, Any]:
    """Join, or go on with what an earlier run of the same order began. The summary of docs/backfill.md.

    UsageError for an order that is not the unfinished one, or logs that changed; FencedError where only
    `--abandon` helps; LockedError; SparkFailedError, UnavailableError, StorageError: run it again.
    """
    began, clock = time.monotonic(), SystemClock()
    place, settings = order.place, order.settings
    load_adapter(settings.adapter.use, settings.adapter.field)
    with locked(place), ExitStack() as opened:
        session: Session = cache(lambda: opened.enter_context(open_session()))  # when it is first needed
        client = opened.enter_context(order.registry.client(CLIENT_TIMEOUT_S, clock))
        job = _resumed(order, client, session, notice)
        if job is not None and job.phase is Phase.DONE:
            return summary_of(job, place, time.monotonic() - began, again=True)
        prepare(place)
        job = job or _planned(order, client, session, clock)
        with leased(job, order, client, clock, notice) as keeper:
            if job.phase is Phase.PLANNED:
                job = join_buckets(session(), job, order, keeper)
                checkpoint("joined")
            Publisher(place, job, keeper, checkpoint).publish()
            checkpoint("published")
        client.dismiss([job.incarnation])
        job = msgspec.structs.replace(job, phase=Phase.DONE)
        place.save(job)
        with storage_errors(place.staging):
            shutil.rmtree(place.staging, ignore_errors=True)
        return summary_of(job, place, time.monotonic() - began)


def look_at_remote(session: Session, uris: Sequence[str]) -> tuple[LogInput, ...]:
    """The files that URIs name now, in the order of their names. SparkFailedError."""
    with spark_failures():
        files = session().read.format("binaryFile").load(list(uris))
        changed_us = F.unix_micros("modificationTime").alias("changed_us")
        told = files.select("path", "length", changed_us).collect()
    return tuple(LogInput(row.path, row.length, str(row.changed_us)) for row in sorted(told))


def locked(place: Place) -> DirectoryLock:
    """LockedError: another backfill of this datacenter runs."""
    try:
        return DirectoryLock(place.home)
    except LockedError as error:
        raise LockedError(
            f"another backfill works in {place.home}; wait for it, or name another --datacenter"
        ) from error


def _resumed(order: Order, client: RegistryClient, session: Session, notice: Notice) -> Job | None:
    """The job to go on with, or one that is done already; None if a new one is to be planned."""
    place, job = order.place, order.place.load()
    if job is None:
        return None
    facts = {
        "the reading of events, or the adapter": (reading_of(order.settings), job.reading),
        "--format": (order.output_format, job.output_format),
        "--primary or --foreign": ((absolute(order.primary), absolute(order.foreign)), job.patterns),
    }
    changed = [what for what, (now, before) in facts.items() if now != before]
    if job.phase is Phase.DONE:
        if not changed and _inputs(order, session) == (job.primary, job.foreign):
            notice("this backfill is done already; its logs are as they were")
            return job
        check_registry(job, place, client.identity())
        place.put_away(job, "done")
        return None
    if changed:
        raise UsageError(
            f"{place.home} has an unfinished backfill, and {changed[0]} is not what it was begun with; "
            "run the same command again, or --abandon it first"
        )
    check_registry(job, place, client.identity())
    if job.phase is Phase.PLANNED:
        if job.spark != pyspark.__version__:
            raise UsageError(
                f"{place.home} has an unfinished backfill of PySpark {job.spark}, and this is another, "
                "where rows might fall into other buckets; use that one, or --abandon it first"
            )
        check_unchanged([*job.primary, *job.foreign], partial(look_at_remote, session))
    notice("going on with the backfill that was begun")
    return job


def _planned(order: Order, client: RegistryClient, session: Session, clock: Clock) -> Job:
    """A new job, durably noted before anything is registered for it."""
    registry = client.identity()  # it may not answer: asked before Spark is started
    for old in order.place.put_away_jobs():
        check_registry(old, order.place, registry)
    primary, foreign = _inputs(order, session)
    job = Job(
        incarnation=secrets.randbits(64),
        begun_us=clock.now_us(),
        reading=reading_of(order.settings),
        spark=pyspark.__version__,
        output_format=order.output_format,
        patterns=(absolute(order.primary), absolute(order.foreign)),
        primary=primary,
        foreign=foreign,
        buckets=buckets_for(primary, foreign, 2 * session().sparkContext.defaultParallelism),
        first_number=next_number(order.place),
        registry=registry,
    )
    order.place.save(job)
    return job


def _inputs(order: Order, session: Session) -> tuple[tuple[LogInput, ...], tuple[LogInput, ...]]:
    look = partial(look_at_remote, session)
    return look_at(order.primary, "primary", look), look_at(order.foreign, "foreign", look)


def absolute(patterns: Sequence[str]) -> tuple[str, ...]:
    absolute = tuple(pattern if is_uri(pattern) else str(Path.cwd() / pattern) for pattern in patterns)
    for pattern in absolute:
        check_name(pattern)
    return absolute


def prepare(place: Place) -> None:
    """UsageError where files can't be renamed into place."""
    directories = (place.staging, place.joined, place.letters)
    for directory in directories:
        with storage_errors(directory):
            make_directory(directory)
    if len({directory.stat().st_dev for directory in directories}) > 1:
        raise UsageError(
            f"{place.out}: joined, dead-letters and .photon-backfill lie on different file systems; "
            "files are renamed from one to the other, so put them on one"
        )


@contextmanager
def leased(
    job: Job, order: Order, client: RegistryClient, clock: Clock, notice: Notice
) -> Iterator[LeaseKeeper]:
    """The lease of the job's incarnation, from before anything is registered. FencedError,
    SettingsMismatchError."""
    place = order.place
    # Recovery gives events up for lost only if their incarnation wrote to an output that recovery was given.
    # In every run, for what a killed one wrote may not be durable.
    note_life(place.joined, STEM, Life(job.incarnation, place.token_address, job.begun_us))
    lease = Lease(place.token_address, job.incarnation, order.settings.registry.lease_s)
    keeper = LeaseKeeper(client, lease, clock, notice, lambda _: None, identity_digest(order.settings))
    keeper.start()
    try:
        await_lease(keeper, job, place, time.monotonic() + FIRST_LEASE_WAIT_S_MAX)
        yield keeper
    finally:
        keeper.stop()


def join_buckets(session: SparkSession, job: Job, order: Order, keeper: LeaseKeeper) -> Job:
    """Every bucket registered and staged: the job with its results, durably noted.

    FencedError; SparkFailedError: run it again.
    """
    place = replace(order.place, out=order.place.out.absolute())
    clear_staging(place)
    send_adapter(session, order.settings.adapter.use)
    for name, value in SESSION_SETTINGS.items():
        session.conf.set(name, value)
    try:
        with spark_failures():
            rows = rows_of(session, job.primary, job.foreign, order.settings, place.staging)
            job = joined(rows, Work(job, place, order.settings, order.registry))
    except Exception as error:
        if keeper.own.fenced:
            raise fenced(job, order.place) from error
        raise
    # Two attempts may have read different lines, if a log was replaced meanwhile.
    check_unchanged([*job.primary, *job.foreign], partial(look_at_remote, lambda: session))
    place.save(job)
    return job


def joined(rows: DataFrame, work: Work) -> Job:
    """The job with its results, whose staged files are durable."""
    results = results_of(rows, work)
    with storage_errors(work.place.staging):
        sync_directory(work.place.staging)
    return msgspec.structs.replace(work.job, phase=Phase.JOINED, results=tuple(results))


def results_of(rows: DataFrame, work: Work) -> list[BucketResult]:
    """What became of each bucket that has rows, by the attempt whose result Spark took."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        for result in join_bucket(batches, work):
            yield pa.RecordBatch.from_pydict({"result": [msgspec.json.encode(result).decode()]})

    told = map_in_arrow(in_buckets(rows, work.job.buckets), task, "result string").collect()
    results = [msgspec.json.decode(row.result, type=BucketResult) for row in told]
    return sorted(results, key=lambda result: result.bucket)


def clear_staging(place: Place) -> None:
    """Of what earlier attempts left, which is never published. StorageError."""
    with storage_errors(place.staging):
        for left in place.staging.iterdir():
            left.unlink(missing_ok=True)


def send_adapter(session: SparkSession, use: str) -> None:
    """To executors elsewhere, the module that the settings name; a package must be installed there."""
    source = adapter_source(use)
    if source is not None and not str(session.sparkContext.master).startswith("local"):
        session.sparkContext.addPyFile(str(source))
