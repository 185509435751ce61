"""`photon backfill --follow`: the join as a Structured Streaming job, one more datacenter of a registry.

    growth.py -> ranges -> parsed lines -> primaries, each once  --+
                                        -> foreign events ---------+-- stream-stream join -> a batch's rows
    a batch's rows -> buckets -> registered, staged -> published            (foreachBatch)

A batch is a backfill of its own: its rows are the same in every attempt, as Spark keeps which files of ranges
it reads and what state it began with; its buckets have tokens of their own, the same in every attempt; which
attempt's files count is settled once, and they are published under the lease (spark.backfill.run).

What waits, on either side, is in Spark's state. Its clock is when lines were given out, so no line is late:
primaries are kept for `registry.retention_days`, a foreign event waits `joiner.unjoinable_age_s`.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from idregistry.client import RegistryClient
from joiner.adapter import load_adapter
from joiner.leases import LeaseKeeper
from joiner.output import Checkpoint
from photon.core.clock import SystemClock
from photon.core.disk import make_directory, read_json, storage_errors, write_json
from photon.core.errors import PhotonError, UsageError
from photon.core.settings import SERVED_RETENTION_DAYS, Settings
from spark.backfill.bucket import Work
from spark.backfill.growth import FOREIGN, PRIMARY, Growth, range_of, ranges_of
from spark.backfill.job import BUCKETS_MAX, Job, LogInput, Phase, Place, reading_of, summary_of
from spark.backfill.publishing import Abandoned, Publisher, abandon, fenced, next_number
from spark.backfill.rows import KIND_BITS, SCHEMA, Kind, foreign_rows, place_of, primary_rows
from spark.backfill.run import (
    CLIENT_TIMEOUT_S,
    OpenSession,
    Order,
    absolute,
    clear_staging,
    joined,
    leased,
    locked,
    prepare,
    send_adapter,
)
from spark.reading.lines import batch_of, chunks_of
from spark.reading.paths import is_uri
from spark.session import SparkFailedError, map_in_arrow, spark_failures
from spark.streaming import LOOK_S, Batches, attend, check_left, prepare_session

ROWS_A_BUCKET: Final = 200_000
SAME_PRIMARY_WITHIN: Final = "10 minutes"
"""A primary event that is logged again so soon counts once."""
_STATE: Final = "follow.json"
_ROW_SCHEMA: Final = SCHEMA.append(pa.field("at_us", pa.int64()))

Told = Callable[[int, dict[str, Any]], None]
"""Called with the number of each batch that is published, and its summary."""


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept between runs. `home`: where it was begun; `batch`: Spark's number of the last one that had
    rows, `job` what became of it; `next_us`, `next_number`: of the tokens and files of the next one."""

    home: str
    registry: str
    reading: str
    spark: str
    output_format: str
    patterns: tuple[tuple[str, ...], tuple[str, ...]]
    next_us: int
    next_number: int
    batch: int = -1
    job: Job | None = None

    @property
    def unfinished(self) -> Job | None:
        return None if self.job is None or self.job.phase is Phase.DONE else self.job


def follow(
    order: Order,
    open_session: OpenSession,
    told: Told = lambda *_: None,
    notice: Callable[[str], None] = lambda _: None,
    checkpoint: Checkpoint = lambda _: None,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Join what the logs gain, while `going`. Killed anywhere, the same call goes on. What can't be is
    refused before Spark is started.

    UsageError for an order that is not the one it was begun with, or logs that were cut; FencedError where
    only `--abandon` helps; LockedError; SparkFailedError, UnavailableError, StorageError: run it again.
    """
    clock = SystemClock()
    load_adapter(order.settings.adapter.use, order.settings.adapter.field)
    with locked(order.place), ExitStack() as opened:
        client = opened.enter_context(order.registry.client(CLIENT_TIMEOUT_S, clock))
        state = _begun(order, client.identity())
        prepare(order.place)
        growth = Growth(home_of(order.place), state.patterns, clock)
        session = opened.enter_context(open_session())
        life = state.unfinished or _job(state, secrets.randbits(64), 0, ())
        keeper = opened.enter_context(leased(life, order, client, clock, notice))
        batches = _Batches(order, state, life.incarnation, keeper, growth, told, checkpoint)
        try:
            with spark_failures():
                query = _started(session, order, growth, batches)
                attend(query, growth.look, LOOK_S, going)
                query.stop()
        except SparkFailedError as error:
            if keeper.own.fenced:
                raise fenced(life, order.place) from error
            raise batches.failure or error from error
        finally:
            if batches.end():
                with suppress(PhotonError):
                    client.dismiss([life.incarnation])


def home_of(place: Place) -> Path:
    return place.home / "follow"


def _checkpoints(place: Place) -> Path:
    return home_of(place) / "spark"


def load_followed(place: Place) -> Followed | None:
    """CorruptStateError, StorageError."""
    return read_json(home_of(place) / _STATE, Followed)


def save_followed(place: Place, state: Followed) -> None:
    path = home_of(place) / _STATE
    with storage_errors(path):
        make_directory(path.parent)
    write_json(path, state)


def abandon_followed(order: Order, client: RegistryClient, notice: Callable[[str], None]) -> Abandoned | None:
    """Give up the batch that is not finished, whose rows the next run joins anew; None if there is none.

    The place's lock is held. UsageError; UnavailableError: run it again.
    """
    state = load_followed(order.place)
    if state is None or state.unfinished is None:
        return None
    done = abandon(state.unfinished, order.place, client, notice)
    save_followed(order.place, msgspec.structs.replace(state, batch=state.batch - 1, job=None))
    return done


def _begun(order: Order, registry: str) -> Followed:
    """What an earlier run has left, or a new one's beginning. UsageError."""
    place, state = order.place, load_followed(order.place)
    now: dict[str, Any] = {
        "reading": reading_of(order.settings),
        "spark": pyspark.__version__,
        "output_format": order.output_format,
        "patterns": (absolute(order.primary), absolute(order.foreign)),
    }
    if state is not None:
        check_left(home_of(place), state.home, _checkpoints(place), state.batch)
        _check(state, place, registry, now)
        state = msgspec.structs.replace(state, **now)
        save_followed(place, state)
        return state
    if place.load() is not None or next(place.put_away_jobs(), None) is not None:
        raise UsageError(f"{place.home} has a backfill; follow logs under another --datacenter")
    if uris := [pattern for pattern in (*order.primary, *order.foreign) if is_uri(pattern)]:
        raise UsageError(f"{uris[0]}: --follow reads logs on a disk that all executors see")
    next_us = SystemClock().now_us()
    home, number = os.path.abspath(home_of(place)), next_number(place)
    state = Followed(home=home, registry=registry, next_us=next_us, next_number=number, **now)
    save_followed(place, state)
    return state


def _check(state: Followed, place: Place, registry: str, now: Mapping[str, Any]) -> None:
    """UsageError for another registry, or where a batch would not go on as it began. Between batches the rest
    may change."""
    if registry != state.registry:
        raise UsageError(
            f"{home_of(place)} registers with the registry {state.registry}, and this is {registry}; name "
            "that one, or begin under another --datacenter"
        )
    told = {
        "reading": "the reading of events, or the adapter,",
        "spark": "PySpark's version",
        "output_format": "--format",
        "patterns": "--primary or --foreign",
    }
    for name, what in told.items():
        if state.unfinished is not None and getattr(state, name) != now[name]:
            raise UsageError(
                f"{home_of(place)} has an unfinished batch, and {what} is not what it was begun with; run "
                "the same command again, or --abandon it first"
            )


def _job(state: Followed, incarnation: int, buckets: int, logs: tuple[LogInput, ...]) -> Job:
    """Of a batch. Its rows tell places in all logs by one row of numbers."""
    return Job(
        incarnation=incarnation,
        begun_us=state.next_us,
        reading=state.reading,
        spark=pyspark.__version__,
        output_format=state.output_format,
        patterns=state.patterns,
        primary=(),
        foreign=logs,
        buckets=buckets,
        first_number=state.next_number,
        registry=state.registry,
    )


class _Batches(Batches):
    def __init__(
        self,
        order: Order,
        state: Followed,
        incarnation: int,
        keeper: LeaseKeeper,
        growth: Growth,
        told: Told,
        checkpoint: Checkpoint,
    ) -> None:
        self.state = state
        self._work = replace(order, place=replace(order.place, out=order.place.out.absolute()))
        self._incarnation = incarnation
        self._keeper = keeper
        self._growth = growth
        self._told = told
        self._checkpoint = checkpoint
        self._mutex = threading.Lock()
        self._ended = False

    def end(self) -> bool:
        """No batch begins any more. Whether none is unfinished."""
        with self._mutex:
            self._ended = True
            return self.state.unfinished is None

    def take_made(self, rows: DataFrame, number: int) -> None:
        began = time.monotonic()
        count = rows.count()  # in any case
        job = self._planned(count, number)
        if job is None:
            return
        place = self._work.place
        if job.phase is Phase.PLANNED:
            clear_staging(place)
            job = self._save(joined(rows, Work(job, place, self._work.settings, self._work.registry)))
            self._checkpoint("joined")
        Publisher(place, job, self._keeper, self._checkpoint).publish()
        self._checkpoint("published")
        self._save(msgspec.structs.replace(job, phase=Phase.DONE))
        self._told(number, summary_of(job, place, time.monotonic() - began))

    def _planned(self, count: int, number: int) -> Job | None:
        """The batch's job, durably noted before anything is registered for it; None if it has no rows, or is
        published, and Spark was killed before it noted that."""
        state = self.state
        if number == state.batch or not count:
            return state.unfinished if number == state.batch else None
        buckets = min(1 + count // ROWS_A_BUCKET, BUCKETS_MAX)
        job = _job(state, self._incarnation, buckets, self._growth.logs)
        after = {"next_us": state.next_us + buckets, "next_number": state.next_number + buckets}
        with self._mutex:
            if self._ended:
                raise SparkFailedError("it is being stopped")
            self.state = msgspec.structs.replace(state, batch=number, **after)
            return self._save(job)

    def _save(self, job: Job) -> Job:
        self.state = msgspec.structs.replace(self.state, job=job)
        save_followed(self._work.place, self.state)
        return job


def _started(session: SparkSession, order: Order, growth: Growth, batches: _Batches) -> Any:
    """The query. Two stateful steps: primaries each once; and the join, of which an event that nobody met
    comes by itself."""
    send_adapter(session, order.settings.adapter.use)
    tasks = session.sparkContext.defaultParallelism
    prepare_session(session, tasks)
    settings = order.settings
    kept_s = round(86_400 * (settings.registry.retention_days or SERVED_RETENTION_DAYS))
    waits_s = round(settings.joiner.unjoinable_age_s)
    ranges = ranges_of(session, growth.ranges).repartition(tasks, "number", "start")
    primaries = (
        _parsed(ranges.filter(F.col("side") != FOREIGN), settings, [Kind.PRIMARY], "p")
        .withWatermark("p_at", SAME_PRIMARY_WITHIN)
        .dropDuplicatesWithinWatermark(["p_key"])
    )
    foreigns = _parsed(ranges.filter(F.col("side") != PRIMARY), settings, [Kind.FOREIGN], "f").withWatermark(
        "f_at", SAME_PRIMARY_WITHIN
    )
    within = f"p_at >= f_at - INTERVAL {kept_s} SECONDS AND p_at <= f_at + INTERVAL {waits_s} SECONDS"
    met = foreigns.join(primaries, F.expr(f"f_key = p_key AND {within}"), "leftOuter")
    both = met.select(F.explode(F.array(_side(met, "p"), _side(met, "f"))).alias("row")).select("row.*")
    rest = [Kind.PRIMARY_COUNT, Kind.PRIMARY_MALFORMED, Kind.FOREIGN_MALFORMED]
    others = _parsed(ranges, settings, rest, "o")
    rows = both.unionByName(others.select(_side(others, "o").alias("row")).select("row.*"))
    writer = rows.filter("length(key) = 16").writeStream.foreachBatch(batches.take)
    return writer.option("checkpointLocation", str(_checkpoints(order.place).absolute())).start()


def _parsed(ranges: DataFrame, settings: Settings, kinds: Collection[Kind], name: str) -> DataFrame:
    """The rows of those kinds, their columns named `<name>_*`; `at`: when their lines were given out."""

    def parse(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for one in batch.to_pylist():
                yield from _rows(one, settings, kinds)

    rows = map_in_arrow(ranges, parse, from_arrow_schema(_ROW_SCHEMA))
    rows = rows.withColumn("at", F.timestamp_micros("at_us")).drop("at_us")
    return rows.select([F.col(column).alias(f"{name}_{column}") for column in rows.columns])


def _rows(given: dict[str, Any], settings: Settings, kinds: Collection[Kind]) -> Iterator[Any]:
    """Of a range; of a tick one of each kind, whose key is none, so that the time goes on."""
    if given["side"] not in (PRIMARY, FOREIGN):
        places = [place_of(kind, 0, 0) for kind in kinds]
        keys = [bytes([kind]) for kind in kinds]
        yield _at(batch_of(SCHEMA, len(places), key=keys, place=places), given["at_us"])
        return
    make = primary_rows if given["side"] == PRIMARY else foreign_rows
    parse = make(settings, {given["name"]: given["number"]})
    for path, chunk in chunks_of(range_of(given), settings.logs, False):
        for batch in parse(given["name"], path, chunk):
            if int(batch.column("place")[0].as_py()) >> KIND_BITS in kinds:
                yield _at(batch, given["at_us"])


def _at(batch: Any, at_us: int) -> Any:
    columns = [*batch.columns, pa.repeat(at_us, batch.num_rows)]
    return pa.RecordBatch.from_arrays(columns, schema=_ROW_SCHEMA)


def _side(rows: DataFrame, name: str) -> Any:
    """One side's columns as a row of spark.backfill.rows."""
    return F.struct(*[rows[f"{name}_{column}"].alias(column) for column in SCHEMA.names])
