"""`photon millwheel spark`: a topology that Spark runs live, by Structured Streaming (docs/millwheel.md).

    growth.py -> ranges, ticks -> records, marks -> a step for each computation -> lines of sinks
                                                                                   (foreachBatch)

Which lines a batch has is the same in every attempt, as Spark keeps which files of ranges it reads; so are
the time and the injectors' low watermarks, which stand in these. Lines for sinks are staged, noted, and then
at the end of the same files that a run has, once, whatever is killed.

    WORK/spark/live.json     what is kept between runs
    WORK/spark/looked.json, ranges/, checkpoints/, staged/
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from millwheel.computation import BEFORE
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.wheel import Lines, summed
from millwheel.errors import TopologyError
from millwheel.sinks import SinkFiles, begin
from millwheel.sources import Listed
from millwheel.topology import DEAD_LETTERS, LogSink, Topology, dead_letters, load_topology
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock, make_directory, read_json, storage_errors, write_file, write_json
from photon.core.errors import UsageError
from spark.backfill.growth import TICK, Growth, range_of, ranges_of
from spark.backfill.run import send_adapter
from spark.history.run import SESSION_CONF as HISTORY_CONF
from spark.history.run import check
from spark.history.steps import Mark, marks, stepped
from spark.history.tasks import READING, ROW, TOLD, Work, parsing, sink_rows, told
from spark.options import ALL
from spark.reading.lines import chunks_of
from spark.session import SparkFailedError, map_in_arrow, spark_failures
from spark.streaming import SESSION_CONF as STREAMING_CONF
from spark.streaming import Batches, attend, check_left, prepare_session, stop

SESSION_CONF: Final = {
    **STREAMING_CONF,
    **HISTORY_CONF,
    "spark.python.authenticate.socketTimeout": "60s",  # to start a Python, on a machine that has much to do
    "spark.sql.streaming.fileSource.log.compactInterval": "1000",  # each time all names ever are written anew
}
BATCH_BYTES_MAX: Final = 64 << 20
"""Of logs: the lines that come of it are in the driver's memory."""
_ROW: Final = from_arrow_schema(ROW)
_PARTS_A_TASK: Final = 2
Told = Callable[[dict[str, Any]], None]
"""Called with the summary of each batch in which something came."""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept between runs. `home`: where it was begun; `batch`: Spark's number of the last one whose
    lines are staged; `places`: of the sinks' files; `staged`: not all lines are in them yet."""

    home: str
    numbers: dict[str, int]
    parts: int
    tasks: int
    spark: str
    patterns: list[list[str]]
    places: dict[str, bytes]
    batch: int = -1
    staged: list[str] = []


def check_live(topology: Topology) -> None:
    """TopologyError for what Spark can't run, with the reason."""
    for name, injector in topology.injectors.items():
        why = {
            "it copies its sources, which `photon millwheel run` does": injector.imported,
            "it is pushed to: have `photon millwheel run` receive it, or log it": injector.listen,
            'silent="hold" goes by the last line of each log': injector.silent == "hold",
            "a percentile goes by the lines of all logs": injector.percentile is not None,
            "expected files are awaited by a run": injector.expected,
        }
        for reason, given in why.items():
            if given:
                raise TopologyError(
                    f"injector '{name}': {reason}, and a query of Spark's knows how long its logs are and "
                    "no more when a batch begins; use `photon millwheel run`"
                )
    for name in [name for name, sink in topology.sinks.items() if sink.published_to]:
        raise TopologyError(
            f"sink '{name}': only workers of a run publish; use `photon millwheel run`, or leave publish out"
        )
    check(topology, {})


def live(
    name: str,
    work: Path,
    open_session: Callable[[], AbstractContextManager[SparkSession]],
    every_s: float,
    told_batch: Told = lambda _: None,
    going: Callable[[], bool] = lambda: True,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> None:
    """Run MODULE:TOPOLOGY over what its logs gain, a batch every `every_s` seconds at most, while `going`.
    Killed anywhere, the same call goes on. What can't be is refused before Spark is started.

    UsageError, TopologyError for what can't be; LockedError; SparkFailedError, StorageError: run it again.
    """
    topology = load_topology(name)
    check_live(topology)
    home = work / "spark"
    with DirectoryLock(work), ExitStack() as opened:
        patterns = [list(map(os.path.abspath, one.patterns)) for one in topology.injectors.values()]
        left, places = _left(home, topology, patterns), {}
        if left is None:
            places = {sink: begin(made, sink, 0) for sink, made in _sinks(topology, work).items()}
        session = opened.enter_context(open_session())
        state = left or _begun(home, topology, patterns, places, session.sparkContext.defaultParallelism)
        plan = Plan(topology, state.numbers)
        listed = {side: Listed() for side, one in enumerate(topology.injectors.values()) if one.listed}
        growth = Growth(
            home,
            state.patterns,
            SystemClock(),
            True,
            lambda side, path: side not in listed or listed[side].has(path),
            BATCH_BYTES_MAX,
            shared=True,
        )
        batches = _Batches(home, state, plan, work, told_batch, checkpoint)
        opened.callback(batches.close)
        send_adapter(session, name)
        order = Work(name, os.getcwd(), state.numbers, state.parts, True, ALL, ALL)
        try:
            with spark_failures():
                query = _started(session, home, state, order, growth, batches)
                opened.callback(stop, query)
                attend(query, growth.look, every_s, going)
        except SparkFailedError as error:
            raise batches.failure or error from error


def _begun(
    home: Path, topology: Topology, patterns: list[list[str]], places: dict[str, bytes], tasks: int
) -> Live:
    """StorageError."""
    state = Live(
        home=os.path.abspath(home),
        numbers=numbered(topology, {}),
        parts=_PARTS_A_TASK * tasks,
        tasks=tasks,
        spark=pyspark.__version__,
        patterns=patterns,
        places=places,
    )
    with storage_errors(home):
        shutil.rmtree(home, ignore_errors=True)
        make_directory(home / "staged")
        _save(home, state)
    return state


def _left(home: Path, topology: Topology, patterns: list[list[str]]) -> Live | None:
    """What an earlier run has left. UsageError, CorruptStateError, StorageError."""
    state = read_json(home / "live.json", Live)
    if state is None:
        return None
    check_left(home, state.home, home / "checkpoints", state.batch)
    for what, then, now in (
        ("its computations, inputs and sinks", state.numbers, numbered(topology, {})),
        ("PySpark's version", state.spark, pyspark.__version__),
        ("its logs", state.patterns, patterns),
    ):
        if now != then:
            raise UsageError(
                f"{home}: {what} are not what this was begun with, and Spark's state goes with them; "
                "begin in another --work, with sinks in other directories"
            )
    return state


def _sinks(topology: Topology, work: Path) -> dict[str, LogSink]:
    return {**topology.sinks, DEAD_LETTERS: dead_letters(topology, work)}


def _save(home: Path, state: Live) -> None:
    write_json(home / "live.json", state)


class _Batches(Batches):
    def __init__(
        self,
        home: Path,
        state: Live,
        plan: Plan,
        work: Path,
        told_batch: Told,
        checkpoint: Callable[[str], None],
    ) -> None:
        self._home, self._state = home, state
        self._told, self._checkpoint = told_batch, checkpoint
        left = {name: [(state.batch, self._staged(name).read_bytes())] for name in state.staged}
        self._files = {
            name: SinkFiles(sink, name, 0, state.places[name], left.get(name, ()))
            for name, sink in _sinks(plan.topology, work).items()
        }
        self._settle()

    def close(self) -> None:
        for files in self._files.values():
            files.close()

    def take_made(self, rows: DataFrame, number: int) -> None:
        began = time.monotonic()
        counted = [told(bytes(row.blob)) for row in rows.filter(F.col("what") == TOLD).collect()]
        if number <= self._state.batch:
            return  # Spark was killed before it noted that; its state is made now
        with storage_errors(self._home):
            self._write(number, self._lines(rows))
        counts = summed([{one.name: one.counts} for one in counted])
        if any(any(of_one.values()) for of_one in counts.values()):
            seconds = round(time.monotonic() - began, 3)
            self._told({"batch": number, "seconds": seconds, "counts": counts})

    def _write(self, number: int, lines: dict[str, bytes]) -> None:
        for name, data in lines.items():
            write_file(self._staged(name), data)
        self._checkpoint("staged")
        self._state = msgspec.structs.replace(self._state, batch=number, staged=list(lines))
        _save(self._home, self._state)
        self._checkpoint("noted")
        for name, data in lines.items():
            self._files[name].append(Lines(name, number, data))
        self._checkpoint("written")
        self._settle()

    def _lines(self, rows: DataFrame) -> dict[str, bytes]:
        """By sink."""
        sinks = {sink_rows(name): name for name in self._files}
        found: dict[str, list[bytes]] = {}
        wanted = rows.filter(F.col("what").isin(*sinks)).select("what", "blob")
        for row in wanted.toLocalIterator():
            found.setdefault(sinks[row.what], []).append(bytes(row.blob))
        return {name: b"\n".join(of_one) + b"\n" for name, of_one in found.items()}

    def _settle(self) -> None:
        """All that is staged is in the files: durably, and noted."""
        if not self._state.staged:
            return
        places = {name: files.sync(files.begin_sync()[1]) for name, files in self._files.items()}
        self._state = msgspec.structs.replace(self._state, places=places, staged=[])
        _save(self._home, self._state)
        for name, files in self._files.items():
            files.noted(places[name])

    def _staged(self, name: str) -> Path:
        return self._home / "staged" / name


def _started(
    session: SparkSession, home: Path, state: Live, work: Work, growth: Growth, batches: _Batches
) -> Any:
    prepare_session(session, state.tasks)
    ranges = ranges_of(session, growth.ranges).repartition(state.tasks, "number", "start")
    rows = map_in_arrow(ranges, partial(_records, work), _ROW)
    for name in work.plan().order:
        rows = stepped(rows, work, name)
    writer = rows.writeStream.foreachBatch(batches.take)
    return writer.option("checkpointLocation", str((home / "checkpoints").absolute())).start()


def _records(work: Work, batches: Iterable[Any]) -> Iterator[Any]:
    """Ranges -> rows of ROW: records of the injectors' inputs; and of a tick the marks."""
    injectors = work.plan().topology.injectors
    names = list(injectors)
    parse = {side: parsing(work, name, BEFORE) for side, name in enumerate(names)}
    for batch in batches:
        for one in batch.to_pylist():
            if one["side"] == TICK:
                made: list[Mapping[str, Any]] = []
                for name, injector in injectors.items():
                    low = one["at_us"] - round(injector.lateness_s * 1e6) if one["end"] else BEFORE
                    made += marks(work.parts, Mark(name, 0, one["at_us"]), low)
                yield pa.RecordBatch.from_pylist(made, ROW)
                continue
            for path, chunk in chunks_of(range_of(one), READING, False):
                yield from parse[one["side"]](one["name"], path, chunk)
