"""`photon millwheel verify`: what a topology makes of its logs, held against what its sinks have.

Lines are compared as a run wrote them, byte by byte, and counted: what should be there and is not, and what
is there and should not be, or once too often.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from millwheel import history
from millwheel.errors import TopologyError
from millwheel.sinks import files_of
from millwheel.topology import Topology
from photon.core.errors import UsageError
from photon.core.settings import Settings
from photon.logs.files import Chunk, find
from spark.history.run import Recomputed
from spark.history.tasks import READING, sink_rows
from spark.options import ALL, Span
from spark.reading.events import parsed_logs
from spark.reading.lines import LogFile, LogSet, Parse, local_file
from spark.session import map_in_arrow, spark_failures

EXAMPLES: Final = 3
_LINE_BYTES_MAX: Final = 64 << 20
_LINES: Final = pa.schema([("sink", pa.string()), ("line", pa.binary())])
_ROW: Final = from_arrow_schema(_LINES)


class _Timed(msgspec.Struct):
    time: int


_time: Final = msgspec.json.Decoder(_Timed).decode


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one sink: lines that are as they should be, lines that lack, lines too many; some of these."""

    equal: int
    missing: int
    extra: int
    examples_missing: list[str]
    examples_extra: list[str]

    @property
    def ok(self) -> bool:
        return not (self.missing or self.extra)


def check(topology: Topology, sinks: Sequence[str], kept: Span) -> list[str]:
    """The sinks that are compared: these, or all. UsageError, TopologyError."""
    for sink in sinks:
        if sink not in topology.sinks:
            there = ", ".join(f"'{name}'" for name in topology.sinks) or "none"
            raise UsageError(f"--sink {sink}: no such sink; there are {there}")
    chosen = list(sinks) or list(topology.sinks)
    if not chosen:
        raise TopologyError("a topology without sinks has nothing to be compared")
    timeless = [sink for sink in chosen if not topology.sinks[sink].with_time]
    if timeless and kept != ALL:
        raise UsageError(
            f"sink '{timeless[0]}' does not say when its lines were: compare all of them, without --from and "
            "--to, name others by --sink, or let it be LogSink(..., with_time=True)"
        )
    return chosen


def compare(
    made: Recomputed, session: SparkSession, sinks: Sequence[str], histories: Sequence[Path], kept: Span
) -> dict[str, Verdict]:
    """`made` has run; `histories`: directories whose lines count among those of the sinks. SparkFailedError,
    StorageError."""
    with spark_failures():
        lines = [_made(made, sink).withColumn("n", F.lit(1)) for sink in sinks]
        lines += [
            _written(session, made.plan.topology, sink, histories, kept).withColumn("n", F.lit(-1))
            for sink in sinks
        ]
        counted = (
            reduce(DataFrame.unionByName, lines)
            .repartition(made.parts, "sink", "line")
            .groupBy("sink", "line")
            .agg(F.sum("n").alias("n"), F.sum(F.greatest("n", F.lit(0))).alias("made"))
            .persist(StorageLevel.DISK_ONLY)
        )
        try:
            missing, extra = F.greatest("n", F.lit(0)), F.greatest(-F.col("n"), F.lit(0))
            sums = (F.sum(F.col("made") - missing), F.sum(missing), F.sum(extra))
            found = {row[0]: row[1:] for row in counted.groupBy("sink").agg(*sums).collect()}
            return {sink: _verdict(counted, sink, *found.get(sink, (0, 0, 0))) for sink in sinks}
        finally:
            counted.unpersist()


def _verdict(counted: DataFrame, sink: str, equal: int, missing: int, extra: int) -> Verdict:
    def some(which: str) -> list[str]:
        found = counted.where((F.col("sink") == sink) & F.expr(which)).orderBy("line").limit(EXAMPLES)
        return [row.line.decode("utf-8", "replace") for row in found.collect()]

    return Verdict(equal, missing, extra, some("n > 0") if missing else [], some("n < 0") if extra else [])


def _made(made: Recomputed, sink: str) -> DataFrame:
    return map_in_arrow(made.rows(sink_rows(sink)).select("blob"), partial(_of_blobs, sink), _ROW)


def _of_blobs(sink: str, batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for blob in batch.column(0).to_pylist():
            yield _rows(sink, blob.split(b"\n"))


def _written(
    session: SparkSession, topology: Topology, sink: str, histories: Sequence[Path], kept: Span
) -> DataFrame:
    settings = Settings(logs=replace(READING, line_bytes_max=_LINE_BYTES_MAX))
    logs = LogSet([], settings, partial(_parsing, sink, kept), False)
    return parsed_logs(session, written_files(topology, sink, histories), logs, _ROW)


def written_files(topology: Topology, sink: str, histories: Sequence[Path]) -> list[LogFile]:
    """Those that a run wrote, and those of the histories. StorageError."""
    own = files_of(Path(topology.sinks[sink].directory).absolute(), sink)
    others = find([str((path / history.SINKS / sink / f"{sink}-*.jsonl").absolute()) for path in histories])
    return [local_file(name) for name in (*map(str, own), *(seen.path for seen in others))]


def _parsing(sink: str, kept: Span) -> Parse:
    def parse(_log: str, _path: str, chunk: Chunk) -> Iterator[Any]:
        lines = chunk.data.rstrip(b"\n").split(b"\n")
        if kept != ALL:
            lines = [line for line in lines if _within(kept, line)]
        yield _rows(sink, lines)

    return parse


def _within(kept: Span, line: bytes) -> bool:
    """True of a line whose time can't be read, too: it counts as one too many."""
    try:
        return kept.start <= _time(line).time < kept.end
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def _rows(sink: str, lines: Sequence[bytes]) -> Any:
    return pa.RecordBatch.from_arrays(
        [pa.array([sink] * len(lines)), pa.array(lines, pa.binary())], schema=_LINES
    )
