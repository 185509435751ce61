"""`photon millwheel history`: a topology over logs that are there, on Spark (docs/millwheel.md).

A job for the lines of all logs, then one for each computation in the order of the graph, whose inputs are
shuffled by key and sorted by time. What a job made stands in a table of Parquet before the next one begins,
so a task that is done again makes of the same rows the same. The low watermark of a computation ends where
it would live: at the end of time; or, of logs that go on, where the logs say, held back by what still waits.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from millwheel import history
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.watermarks import of_inputs
from millwheel.engine.wheel import summed
from millwheel.errors import TopologyError
from millwheel.history import Left, low_of
from millwheel.sinks import complete, write_manifest
from millwheel.sources import Listed, pack_position
from millwheel.topology import DEAD_LETTERS, Topology, load_topology
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors, write_json
from photon.core.errors import UsageError
from photon.core.settings import Settings
from photon.logs.files import FileState, SeenFile, end_of_last_line, find
from photon.logs.inventory import read_by_others
from photon.logs.packed import is_packed
from spark.backfill.run import send_adapter
from spark.history.tasks import (
    READING,
    ROW,
    STATE,
    TOLD,
    Told,
    Work,
    compute,
    input_rows,
    parsing,
    sink_rows,
    told,
)
from spark.options import ALL, Span
from spark.reading.events import parsed_logs
from spark.reading.lines import LogFile, LogSet
from spark.reading.paths import escaped, is_uri
from spark.session import map_in_arrow, spark_failures

_ROW: Final = from_arrow_schema(ROW)
_PART_BYTES: Final = 32 << 20
_PARTS_MAX: Final = 4096
_PACKED_BY: Final = 8
"""How many times its size an archive holds, about."""
_FILE_BYTES: Final = 256 << 20
_WORK: Final = ".work"
SESSION_CONF: Final = {"spark.sql.execution.arrow.maxRecordsPerBatch": "64"}  # of blobs


@dataclass(frozen=True, slots=True)
class _Log:
    """A file of a disk, as it was when it was looked at. `size`: how far it is read; `state`: as a run
    remembers it then, but for what is in an archive."""

    seen: SeenFile
    size: int
    state: FileState

    @property
    def packed(self) -> bool:
        return is_packed(self.seen.name)

    @property
    def path(self) -> str:
        return os.path.abspath(self.seen.path)


class Recomputed:
    """A topology's outputs from the logs that there are when this is made."""

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, tuple[str, ...]],
        goes_on: bool = False,
        read: Span = ALL,
        kept: Span = ALL,
    ) -> None:
        """`inputs`: by injector, globs and URIs that are read in place of its own; `goes_on`: the logs will
        grow, so what waits for more of them is kept. Without Spark. UsageError, TopologyError for what can't
        be done; StorageError."""
        topology = load_topology(name)
        check(topology, inputs)
        self.name, self.goes_on, self._inputs = name, goes_on, inputs
        self._logs, self._uris = _logs_of(topology, inputs, goes_on)
        self.numbers = numbered(topology, {})
        self.plan = Plan(topology, self.numbers)
        self._work = Work(name, os.getcwd(), self.numbers, 0, goes_on, read, kept)
        self._told: list[Told] = []
        self.marks: dict[str, int] = {}

    def run(self, session: SparkSession, directory: Path) -> None:
        """In a directory that all executors see. SparkFailedError, StorageError."""
        self._session, self._table = session, str((directory / "rows").absolute())
        with storage_errors(directory):
            make_directory(directory)
        send_adapter(session, self.name)
        with spark_failures():
            self._work = replace(self._work, parts=self._parts())
            self._read()
            for name in self.plan.order:
                self._compute(name)

    @property
    def parts(self) -> int:
        """Of the keys, once it runs."""
        return self._work.parts

    def rows(self, *what: str) -> DataFrame:
        """What all jobs made of that."""
        rows = self._session.read.schema(_ROW).parquet(escaped(self._table))
        return rows.where(F.col("what").isin(*what)).select(*ROW.names)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        counts = summed([{one.name: one.counts} for one in self._told])
        return {name: counts.get(name, {}) for name in self.plan.sources}

    def files(self) -> dict[str, dict[int, bytes]]:
        """As Left has them."""
        files: dict[str, dict[int, bytes]] = {}
        for name, logs in self._logs.items():
            if name not in self._inputs:
                reached = self._reached(name)
                files[name] = {}
                for log in logs:
                    newest, end = reached.get(log.path, (BEFORE, 0))
                    state = read_by_others(log.seen, end, log.state.number) if log.packed else log.state
                    files[name][state.number] = pack_position(newest, state)
        return files

    def _reached(self, injector: str) -> dict[str, tuple[int, int]]:
        """Of each log the newest time in it, and where its last whole line ends."""
        reached: dict[str, tuple[int, int]] = {}
        for one in self._told:
            if one.name == injector and one.log:
                newest, end = reached.get(one.log, (BEFORE, 0))
                reached[one.log] = max(newest, one.newest), max(end, one.end)
        return reached

    def _parts(self) -> int:
        logs = [log for of_one in self._logs.values() for log in of_one]
        size: int = sum(log.size * (_PACKED_BY if log.packed else 1) for log in logs)
        if uris := [uri for of_one in self._uris.values() for uri in of_one]:
            files = self._session.read.format("binaryFile").load(uris)
            (row,) = files.agg(F.sum("length").alias("bytes")).collect()
            size += row.bytes or 0
        least: int = 2 * self._session.sparkContext.defaultParallelism
        return min(_PARTS_MAX, max(least, 1 + size // _PART_BYTES))

    def _read(self) -> None:
        frames = []
        for name in self.plan.injectors:
            files = [LogFile(log.path, log.size, inode=log.seen.inode) for log in self._logs[name]]
            skew = self.plan.topology.injectors[name].skew_max_s
            make = partial(parsing, self._work, name, SystemClock().now_us() + round(skew * 1e6))
            logs = LogSet(self._uris[name], Settings(logs=READING), make, not self.goes_on)
            if files or logs.paths:
                frames.append(parsed_logs(self._session, files, logs, _ROW))
        self._keep(reduce(DataFrame.unionByName, frames))
        for name in self.plan.injectors:
            self.marks[name] = self._low(name) if self.goes_on else NEVER

    def _compute(self, name: str) -> None:
        low = of_inputs(self.plan.makers[name], self.marks)
        rows = self.rows(*map(input_rows, self.plan.inputs_of[name]))
        in_order = rows.repartition(self.parts, "part").sortWithinPartitions("part", "low", "blob")
        self._keep(map_in_arrow(in_order, partial(compute, self._work, name, low), _ROW))
        self.marks[name] = min([low, *(one.oldest for one in self._told if one.name == name)])

    def _keep(self, rows: DataFrame) -> None:
        """Make them, and hear what the tasks tell."""
        rows.write.mode("append").partitionBy("what").parquet(self._table)
        self._told = [told(row.blob) for row in self.rows(TOLD).collect()]

    def _low(self, name: str) -> int:
        """Where its low watermark is, of logs that go on."""
        injector = self.plan.topology.injectors[name]
        newest = {log: newest for log, (newest, _) in self._reached(name).items()}
        if name in self._inputs:  # nobody goes on with these
            return low_of(replace(injector, silent="advance"), [], dict(enumerate(newest.values())))
        logs = self._logs[name]
        numbers = {log.state.number: newest.get(log.path, BEFORE) for log in logs}
        return low_of(injector, [log.state for log in logs], numbers)


def check_new(out: Path) -> None:
    """UsageError: nothing is overwritten but what a history left that was cut off."""
    if out.exists() and any(out.iterdir()) and not (out / _WORK).exists():
        raise UsageError(f"--out {out}: there is something; name a new directory")


def recompute(session: SparkSession, made: Recomputed, out: Path) -> dict[str, Any]:
    """All outputs in a new directory; and, of logs that go on, what a run has to know. The summary.

    They are made below OUT/.work, and moved when all are there; the note for a run comes last.
    LockedError, SparkFailedError, StorageError.
    """
    began = time.monotonic()
    check_new(out)
    work = out / _WORK
    with DirectoryLock(work):
        with storage_errors(out):
            (out / history.NAME).unlink(missing_ok=True)  # one that was cut off behind it
        for left in (out / history.SINKS, out / history.STATE, *filter(Path.is_dir, work.iterdir())):
            shutil.rmtree(left, ignore_errors=True)
        try:
            made.run(session, work)
            lines = _write_sinks(made, work / history.SINKS)
            with spark_failures():
                if made.goes_on:
                    state = made.rows(STATE).select("blob")
                    state.write.parquet(str((work / history.STATE).absolute()))
            os.sync()  # what Spark wrote, before it counts
            with storage_errors(out):
                for name in (history.SINKS, history.STATE):
                    if (work / name).exists():
                        (work / name).rename(out / name)
            write_json(out / history.NAME, _left(made))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    counts = made.counts
    return {
        "seconds": round(time.monotonic() - began, 3),
        "counts": counts,
        "lines": lines,
        "low_watermarks": made.marks,
        "dead_letters": sum(count.get("dead_letters", 0) for count in counts.values()),
        "goes_on": made.goes_on,
    }


def _left(made: Recomputed) -> Left:
    """Its dead letters are told already, and not a run's."""
    return Left(
        topology=made.name,
        goes_on=made.goes_on,
        numbers=made.numbers,
        marks=made.marks,
        counts={name: {**of_name, "dead_letters": 0} for name, of_name in made.counts.items()},
        files=made.files() if made.goes_on else {},
    )


def check(topology: Topology, inputs: Mapping[str, object]) -> None:
    """UsageError, TopologyError for what can't be computed from logs alone."""
    for name in inputs:
        if name not in topology.injectors:
            there = ", ".join(f"'{name}'" for name in topology.injectors)
            raise UsageError(f"--input {name}=...: no such injector; there are {there}")
    for name, injector in topology.injectors.items():
        if injector.imported and name not in inputs:
            raise TopologyError(
                f"injector '{name}' copies its source, from which Spark does not read: say where its logs "
                f"are, --input {name}=..."
            )
    for name, made in topology.computations.items():
        if made.computation.asks_outside:
            raise TopologyError(
                f"computation '{name}' ({type(made.computation).__name__}) asks or changes something "
                "outside, which is not as it was: leave it out of a topology for history"
            )


def _logs_of(
    topology: Topology, inputs: Mapping[str, Sequence[str]], goes_on: bool
) -> tuple[dict[str, list[_Log]], dict[str, list[str]]]:
    """What each injector reads: files, and URIs for Spark."""
    logs: dict[str, list[_Log]] = {}
    uris: dict[str, list[str]] = {}
    for name, injector in topology.injectors.items():
        given = inputs.get(name, injector.patterns)
        uris[name] = [pattern for pattern in given if is_uri(pattern)]
        found = find([pattern for pattern in given if not is_uri(pattern)])
        listed = Listed()
        files = [seen for seen in found if not injector.listed or listed.has(seen.name)]
        logs[name] = [_log(seen, number, goes_on) for number, seen in enumerate(files)]
    if not any(logs.values()) and not any(uris.values()):
        patterns = [p for name, of in topology.injectors.items() for p in inputs.get(name, of.patterns)]
        raise UsageError(f"no file matches {', '.join(map(repr, patterns)) or 'anything'}; check --input")
    return logs, uris


def _log(seen: SeenFile, number: int, goes_on: bool) -> _Log:
    """StorageError."""
    size = seen.size
    with storage_errors(Path(seen.path)):
        if goes_on and not is_packed(seen.name):
            with open(seen.path, "rb") as file:
                size = end_of_last_line(file.fileno(), seen.size)
        return _Log(seen, size, read_by_others(seen, size, number))


def _write_sinks(made: Recomputed, directory: Path) -> dict[str, int]:
    """Files as a run has them, about in the order of time. Lines by sink. SparkFailedError, StorageError."""
    lines: dict[str, int] = {}
    for sink in (*made.plan.topology.sinks, DEAD_LETTERS):
        at = directory / sink
        with spark_failures():
            rows = made.rows(sink_rows(sink))
            (size,) = rows.agg(F.sum(F.octet_length("blob")).alias("bytes")).collect()
            if size.bytes is None:
                lines[sink] = 0
                continue
            by_time = rows.repartitionByRange(1 + size.bytes // _FILE_BYTES, "low")
            texts = by_time.sortWithinPartitions("low", "blob").select(F.col("blob").cast("string"))
            texts.write.text(str(at.absolute()))
        with storage_errors(at):
            names = []
            for number, path in enumerate(sorted(at.glob("part-*"))):
                names.append(at / f"{sink}-{history.STEM}-{number:06}.jsonl")
                path.rename(names[-1])
            for left in (*at.glob("_*"), *at.glob(".*")):
                left.unlink()
        entries = [complete(path) for path in names]
        write_manifest(at / f"{sink}-{history.STEM}.manifest", entries)
        lines[sink] = sum(entry.lines for entry in entries)
    return lines
