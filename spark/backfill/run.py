"""`photon backfill`: the whole join of old logs as a Spark job, beside live pipelines (paper 3.3).

Rows meet by primary id in buckets. A bucket registers under one token, the same in every attempt, so that an
attempt wins again what one before it had won and did not write; rows of a bucket are the same in every
attempt, for the job keeps which bytes of which logs it reads, and how. Within an attempt an id is asked for
once. So the ids of a token and the lines of the bucket's one published file are the same set, each once.

Tasks write files that nobody reads. Which attempt's file is the bucket's is settled once, by the results that
the driver is told and keeps (`Phase.JOINED`); those it publishes, under the lease of the job's incarnation
(spark.backfill.publishing). Without the lease, recovery may release what stands in no joined log, so nothing
is published that may be others' by then. A driver that died is followed by the next run of the same command,
with the same tokens; `--abandon` ends the job otherwise (spark.backfill.publishing).
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from idregistry.client import RegistryAt, RegistryClient
from joiner import parquet
from joiner.adapter import load_adapter
from joiner.leases import Lease, LeaseKeeper
from joiner.output import Checkpoint
from joiner.output_files import Life, note_life
from photon.core.clock import Clock, SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors
from photon.core.errors import LockedError, UsageError
from photon.core.settings import Settings, identity_digest
from spark.backfill.job import (
    STEM,
    Job,
    LogInput,
    Phase,
    Place,
    buckets_for,
    check_registry,
    check_unchanged,
    look_at,
    reading_of,
    summary_of,
)
from spark.backfill.joining import join_buckets, look_at_remote
from spark.backfill.publishing import FIRST_LEASE_WAIT_S_MAX, Publisher, await_lease, next_number
from spark.reading.paths import check_name, is_uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Notice = Callable[[str], None]
OpenSession = Callable[[], AbstractContextManager["SparkSession"]]

_CLIENT_TIMEOUT_S: Final = 10.0


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
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Join, or go on with what an earlier run of the same order began. The summary of docs/backfill.md.

    UsageError for an order that is not the unfinished one, or logs that changed; FencedError where only
    `--abandon` helps; LockedError; SparkFailedError, UnavailableError, StorageError: run it again.
    """
    began, clock = time.monotonic(), clock or SystemClock()
    place, settings = order.place, order.settings
    load_adapter(settings.adapter.use, settings.adapter.field)
    if order.output_format == "parquet":
        parquet.check_installed()
    with locked(place), ExitStack() as opened:
        spark = _Spark(open_session, opened)
        client = opened.enter_context(order.registry.client(_CLIENT_TIMEOUT_S, clock))
        job = _resumed(order, client, spark, notice)
        if job is not None and job.phase is Phase.DONE:
            return summary_of(job, place, time.monotonic() - began, again=True)
        _prepare(place)
        job = job or _planned(order, client, spark, clock)
        with _leased(job, order, client, clock, notice) as keeper:
            if job.phase is Phase.PLANNED:
                session = spark.session()
                job = join_buckets(session, job, place, settings, order.registry, keeper)
                checkpoint("joined")
            job = _published(job, order, keeper, checkpoint)
        with storage_errors(place.staging):
            shutil.rmtree(place.staging, ignore_errors=True)
        return summary_of(job, place, time.monotonic() - began)


class _Spark:
    """A session that is opened when it is first needed."""

    def __init__(self, open_session: OpenSession, opened: ExitStack) -> None:
        self._open = open_session
        self._opened = opened
        self._session: SparkSession | None = None

    def session(self) -> "SparkSession":
        if self._session is None:
            self._session = self._opened.enter_context(self._open())
        return self._session

    def look(self, uris: Sequence[str]) -> tuple[LogInput, ...]:
        """What is behind URIs. SparkFailedError."""
        return look_at_remote(self.session(), uris)


def locked(place: Place) -> DirectoryLock:
    """LockedError: another backfill of this datacenter runs."""
    try:
        return DirectoryLock(place.home)
    except LockedError as error:
        raise LockedError(
            f"another backfill works in {place.home}; wait for it, or name another --datacenter"
        ) from error


def _resumed(order: Order, client: RegistryClient, spark: _Spark, notice: Notice) -> Job | None:
    """The job to go on with, or that is done already; None: a new one is to be planned."""
    place, job = order.place, order.place.load()
    if job is None:
        return None
    now = (reading_of(order.settings), order.output_format, _patterns(order))
    same = now == (job.reading, job.output_format, job.patterns)
    if job.phase is Phase.DONE:
        if same and _inputs(order, spark) == (job.primary, job.foreign):
            notice("this backfill is done already; its logs are as they were")
            return job
        check_registry(job, place, client.identity())
        place.put_away(job, "done")
        return None
    if not same:
        changed = [
            what
            for what, one, other in zip(
                ("the reading of events, or the adapter", "--format", "--primary or --foreign"),
                now,
                (job.reading, job.output_format, job.patterns),
                strict=True,
            )
            if one != other
        ]
        raise UsageError(
            f"{place.home} has an unfinished backfill, and {changed[0]} is not what it was begun with; "
            "run the same command again, or --abandon it first"
        )
    check_registry(job, place, client.identity())
    if job.phase is Phase.PLANNED:
        if job.spark != _spark_version():
            raise UsageError(
                f"{place.home} has an unfinished backfill of PySpark {job.spark}, and this is another, "
                "where rows might fall into other buckets; use that one, or --abandon it first"
            )
        check_unchanged([*job.primary, *job.foreign], spark.look)
    notice("going on with the backfill that was begun")
    return job


def _planned(order: Order, client: RegistryClient, spark: _Spark, clock: Clock) -> Job:
    """A new job, durably noted before anything is registered for it."""
    registry = client.identity()  # it may not answer: asked before Spark is started
    for old in order.place.put_away_jobs():
        check_registry(old, order.place, registry)
    primary, foreign = _inputs(order, spark)
    job = Job(
        incarnation=secrets.randbits(64),
        begun_us=clock.now_us(),
        reading=reading_of(order.settings),
        spark=_spark_version(),
        output_format=order.output_format,
        patterns=_patterns(order),
        primary=primary,
        foreign=foreign,
        buckets=buckets_for(primary, foreign, 2 * spark.session().sparkContext.defaultParallelism),
        first_number=next_number(order.place),
        registry=registry,
    )
    order.place.save(job)
    return job


def _inputs(order: Order, spark: _Spark) -> tuple[tuple[LogInput, ...], tuple[LogInput, ...]]:
    primary = look_at(order.primary, "primary", spark.look)
    return primary, look_at(order.foreign, "foreign", spark.look)


def _patterns(order: Order) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _absolute(order.primary), _absolute(order.foreign)


def _absolute(patterns: Sequence[str]) -> tuple[str, ...]:
    absolute = tuple(pattern if is_uri(pattern) else str(Path.cwd() / pattern) for pattern in patterns)
    for pattern in absolute:
        check_name(pattern)
    return absolute


def _spark_version() -> str:
    from pyspark import __version__

    return str(__version__)


def _prepare(place: Place) -> None:
    """UsageError where files can't be renamed into place."""
    for directory in (place.staging, place.joined, place.letters):
        with storage_errors(directory):
            make_directory(directory)
    devices = {directory.stat().st_dev for directory in (place.staging, place.joined, place.letters)}
    if len(devices) > 1:
        raise UsageError(
            f"{place.out}: joined, dead-letters and .photon-backfill lie on different file systems; "
            "files are renamed from one to the other, so put them on one"
        )


@contextmanager
def _leased(
    job: Job, order: Order, client: RegistryClient, clock: Clock, notice: Notice
) -> Iterator[LeaseKeeper]:
    """The lease of the job's incarnation, from before anything is registered. FencedError,
    SettingsMismatchError."""
    place = order.place
    # Recovery gives events up for lost only if their incarnation wrote to an output that it was told of. Once
    # more in every run: what a killed one wrote may not be durable.
    note_life(place.joined, STEM, Life(job.incarnation, place.token_address, job.begun_us))
    lease = Lease(place.token_address, job.incarnation, order.settings.registry.lease_s)
    keeper = LeaseKeeper(client, lease, clock, notice, lambda _: None, identity_digest(order.settings))
    keeper.start()
    try:
        await_lease(keeper, job, place, time.monotonic() + FIRST_LEASE_WAIT_S_MAX)
        yield keeper
    finally:
        keeper.stop()


def _published(job: Job, order: Order, keeper: LeaseKeeper, checkpoint: Checkpoint) -> Job:
    Publisher(order.place, job, keeper, checkpoint).publish()
    checkpoint("published")
    job = msgspec.structs.replace(job, phase=Phase.DONE)
    order.place.save(job)
    return job
