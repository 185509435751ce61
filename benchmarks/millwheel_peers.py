"""What users would take instead of MillWheel, each a process of its own by an interpreter that has it.

    python -m benchmarks.millwheel_peers NAME LOGS OUT

counts the lines of LOGS/*.jsonl by key and second of their time, `{"key": .., "ts_us": ..}`, and writes JSON
lines below OUT/counts, `{"key": .., "start_us": .., "count": ..}`, in files of any name; `"diff": -1` takes
one back. Killed and started again with the same OUT, it goes on, or begins anew, as its engine does. The last
file has a line of the key "end", an hour after all others, so that an engine that waits for later lines waits
for none. Imports nothing of Photon's.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import CORES, spark_session, spark_write

SECOND_US = 1_000_000
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def photon(logs: Path, out: Path) -> None:
    """Ours, as all the others: in columns, two workers."""
    for name, target in (("logs", logs), ("out", out)):
        if not (out / name).is_symlink():
            (out / name).symlink_to(target)
    os.environ["PYTHONPATH"] = os.getcwd()
    os.chdir(out)
    run = ("millwheel", "run", "benchmarks.millwheel_topologies:WINDOWS", "--work", "work", "--workers", "2")
    os.execv(sys.executable, [sys.executable, "-m", "photon.cli.main", *run])


def duckdb(logs: Path, out: Path) -> None:
    """One aggregation over all files, once: no stream, no restart, but the floor below them all."""
    import duckdb

    (out / "counts").mkdir(parents=True, exist_ok=True)
    duckdb.connect().execute(
        f"""
        COPY (
            SELECT key, ts_us // {SECOND_US} * {SECOND_US} AS start_us, count(*) AS count
            FROM read_ndjson('{logs}/*.jsonl', columns = {{key: 'VARCHAR', ts_us: 'BIGINT'}})
            GROUP BY ALL
        ) TO '{out / "counts" / "counts.jsonl"}' (FORMAT json)
        """
    )


def pathway(logs: Path, out: Path) -> None:
    """Tumbling windows over the files as they are, without persistence: begun anew after a kill."""
    os.environ.setdefault("PATHWAY_THREADS", str(CORES))
    import pathway as pw

    (out / "counts").mkdir(parents=True, exist_ok=True)
    lines = pw.io.jsonlines.read(str(logs), schema=pw.schema_from_types(key=str, ts_us=int), mode="static")
    windows = lines.windowby(lines.ts_us, window=pw.temporal.tumbling(duration=SECOND_US), instance=lines.key)
    counts = windows.reduce(
        key=pw.this._pw_instance, start_us=pw.this._pw_window_start, count=pw.reducers.count()
    )
    pw.io.jsonlines.write(counts, str(out / "counts" / "counts.jsonl"))
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)


def bytewax(logs: Path, out: Path) -> None:
    """Counting windows with recovery; as many workers as there are cores."""
    import subprocess

    recovery, counts = out / "recovery", out / "counts"
    if not recovery.exists():
        recovery.mkdir(parents=True)
        counts.mkdir()
        subprocess.run([sys.executable, "-m", "bytewax.recovery", str(recovery), "1"], check=True)
    os.environ["LOGS"], os.environ["COUNTS"] = str(logs), str(counts)
    flow = f"{Path(__file__).with_name('millwheel_bytewax.py')}:flow"
    command = ["-m", "bytewax.run", flow, "-w", str(CORES), "-r", str(recovery), "-s", "1", "-b", "0"]
    os.execv(sys.executable, [sys.executable, *command])


def spark(logs: Path, out: Path) -> None:
    """Its own windows, with a watermark and a checkpoint."""
    from pyspark.sql import functions as F

    lines = _lines(logs, out)
    windows = lines.groupBy("key", F.window("at", "1 second")).count()
    counted = windows.selectExpr("key", "unix_micros(window.start) AS start_us", "count")
    spark_write(counted, out, "counts")


def spark_state(logs: Path, out: Path) -> None:
    """The same by its arbitrary stateful processing, with timers in event time."""
    import pandas
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Counts(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._handle = handle
            self._counts = handle.getMapState("counts", "second BIGINT", "count BIGINT")

        def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
            for frame in rows:
                for second, count in (frame["ts_us"] // SECOND_US).value_counts().items():
                    before = self._counts.getValue((second,))
                    if before is None:
                        self._handle.registerTimer((int(second) + 1) * 1_000)
                    self._counts.updateValue((int(second),), (int(count) + (before[0] if before else 0),))
            return iter(())

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            second = expiredTimerInfo.getExpiryTimeInMs() // 1_000 - 1
            count = self._counts.getValue((second,))[0]
            self._counts.removeKey((second,))
            yield pandas.DataFrame({"key": [key[0]], "start_us": [second * SECOND_US], "count": [count]})

        def close(self) -> None:
            pass

    lines = _lines(logs, out)
    counts = lines.groupBy("key").transformWithStateInPandas(
        Counts(), "key STRING, start_us BIGINT, count BIGINT", "Append", "EventTime"
    )
    spark_write(counts, out, "counts")


def _lines(logs: Path, out: Path) -> Any:
    settings = {"spark.sql.shuffle.partitions": CORES, "spark.sql.session.timeZone": "UTC"}
    session = spark_session(out, settings | {"spark.sql.streaming.stateStore.providerClass": _ROCKSDB})
    lines = session.readStream.schema("key STRING, ts_us BIGINT").json(str(logs))
    return lines.selectExpr("key", "ts_us", "timestamp_micros(ts_us) AS at").withWatermark("at", "2 seconds")


def flink(logs: Path, out: Path) -> None:
    """SQL windows, a checkpoint a second; goes on from the last one."""
    from pyflink.common import Configuration
    from pyflink.table import EnvironmentSettings, TableEnvironment

    checkpoints = out / "checkpoints"
    settings = {
        "parallelism.default": str(CORES),
        "execution.checkpointing.interval": "1 s",
        "execution.checkpointing.dir": checkpoints.as_uri(),
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "table.local-time-zone": "UTC",
    }
    whole = sorted(checkpoints.glob("*/chk-*/_metadata"), key=lambda path: path.stat().st_mtime)
    if whole:
        settings["execution.state-recovery.path"] = whole[-1].parent.as_uri()
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    environment = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration)
    tables = TableEnvironment.create(environment.build())
    # Its readers take one file after the other, that with the end perhaps first, and drop what is behind the
    # watermark.
    tables.execute_sql(
        f"""
        CREATE TABLE lines (
            `key` STRING, ts_us BIGINT, logged AS TO_TIMESTAMP_LTZ(ts_us / 1000, 3),
            WATERMARK FOR logged AS logged - INTERVAL '2' HOUR
        ) WITH ('connector' = 'filesystem', 'path' = '{logs.as_uri()}', 'format' = 'json')
        """
    )
    tables.execute_sql(
        f"""
        CREATE TABLE counts (`key` STRING, start_us BIGINT, `count` BIGINT)
        WITH ('connector' = 'filesystem', 'path' = '{(out / "counts").as_uri()}', 'format' = 'json')
        """
    )
    tables.execute_sql(
        f"""
        INSERT INTO counts
        SELECT `key`,
            TIMESTAMPDIFF(SECOND, TIMESTAMP '1970-01-01 00:00:00', window_start)
                * CAST({SECOND_US} AS BIGINT),
            count(*)
        FROM TABLE(TUMBLE(TABLE lines, DESCRIPTOR(logged), INTERVAL '1' SECOND))
        GROUP BY `key`, window_start, window_end
        """
    ).wait()


if __name__ == "__main__":
    peers = {
        "photon": photon,
        "duckdb": duckdb,
        "pathway": pathway,
        "bytewax": bytewax,
        "flink": flink,
        "spark": spark,
        "spark-state": spark_state,
    }
    peers[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
