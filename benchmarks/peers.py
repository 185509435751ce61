"""What users would take instead, each run as a process of its own by an interpreter that has it.

    python -m benchmarks.peers NAME LOGS OUT

reads LOGS/queries/*.jsonl and LOGS/clicks/*.jsonl and writes JSON lines below OUT/joined, a line a click:

    {"click_id": .., "primary_id": .., "ts_us": .., "payload": {..},
     "query_id": .., "query_ts_us": .., "query_payload": {..}}

in files of any name that ends in .json or .jsonl. Exit status 0 when all is joined. `photon bench join
--peers` runs them and compares what they wrote with the truth. Imports nothing of Photon's.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

CORES = os.cpu_count() or 1


def duckdb(logs: Path, out: Path) -> None:
    """One hash join over all files, once. No peer of a streaming system, but the floor below them all: it
    knows no growth, no late events, no restart, and writes no event before it has read every other."""
    import duckdb

    (out / "joined").mkdir(parents=True)
    connection = duckdb.connect()
    connection.execute(f"SET temp_directory = '{out / 'spill'}'")
    columns = "columns = {id: 'VARCHAR', ts_us: 'BIGINT', payload: 'JSON'"
    connection.execute(
        f"""
        COPY (
            SELECT c.id AS click_id, c.primary_id, c.ts_us, c.payload,
                   q.id AS query_id, q.ts_us AS query_ts_us, q.payload AS query_payload
            FROM read_ndjson('{logs}/clicks/*.jsonl', {columns}, primary_id: 'VARCHAR'}}) c
            JOIN read_ndjson('{logs}/queries/*.jsonl', {columns}}}) q ON c.primary_id = q.id
        ) TO '{out / "joined" / "joined.jsonl"}' (FORMAT json)
        """
    )


def pathway(logs: Path, out: Path) -> None:
    """The incremental engine over the files, without persistence (with it, it is slower), as many threads as
    there are cores. It keeps all of both sides in memory for as long as it runs."""
    os.environ.setdefault("PATHWAY_THREADS", str(CORES))
    import pathway as pw

    (out / "joined").mkdir(parents=True)
    query = pw.schema_from_types(query_id=str, query_ts_us=int, query_payload=pw.Json)
    click = pw.schema_from_types(click_id=str, primary_id=str, ts_us=int, payload=pw.Json)
    paths = {"query_id": "/id", "query_ts_us": "/ts_us", "query_payload": "/payload"}
    read = partial(pw.io.jsonlines.read, mode="static")
    queries = read(str(logs / "queries"), schema=query, json_field_paths=paths)
    clicks = read(str(logs / "clicks"), schema=click, json_field_paths={"click_id": "/id"})
    pairs = clicks.join(queries, clicks.primary_id == queries.query_id).select(*clicks, *queries)
    pw.io.jsonlines.write(pairs, str(out / "joined" / "joined.jsonl"))
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)


def spark_session(out: Path, settings: dict[str, Any]) -> Any:
    """On all cores of this machine, its own files below `out`."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings |= {
        "spark.driver.memory": "6g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(out / "local"),
        "spark.sql.warehouse.dir": str(out / "warehouse"),
        "spark.log.level": "ERROR",
    }
    return SparkSession.builder.master(f"local[{CORES}]").config(map=settings).getOrCreate()


def spark_write(rows: Any, out: Path, name: str) -> None:
    """All that is there, as JSON below OUT/NAME, with a checkpoint."""
    stream = rows.writeStream.format("json").option("path", str(out / name))
    stream = stream.option("checkpointLocation", str(out / "checkpoint")).trigger(availableNow=True)
    stream.start().awaitTermination()


def spark(logs: Path, out: Path) -> None:
    """A stream-stream join with a checkpoint, so that it goes on exactly once after a kill, over what is
    there when it starts. It forgets queries after 25 hours; that loses none of these clicks."""
    session = spark_session(out, {"spark.sql.shuffle.partitions": 2 * CORES})
    ad = "STRUCT<ad: STRING, position: INT, cost_micros: BIGINT>"
    click = f"id STRING, primary_id STRING, ts_us BIGINT, payload {ad}"
    query = (
        "id STRING, ts_us BIGINT, payload STRUCT<user: STRING, query: STRING, country: STRING, "
        "device: STRING, results: BIGINT, latency_ms: DOUBLE, ads: ARRAY<STRING>>"
    )

    def stream(name: str, schema: str, moment: str, *columns: str) -> Any:
        lines = session.readStream.schema(schema).json(str(logs / name))
        timed = lines.selectExpr(*columns, f"timestamp_micros(ts_us) AS {moment}")
        return timed.withWatermark(moment, "10 minutes")

    clicks = stream("clicks", click, "clicked", "id AS click_id", "primary_id", "ts_us", "payload")
    named = ("id AS query_id", "ts_us AS query_ts_us", "payload AS query_payload")
    queries = stream("queries", query, "asked", *named)
    clicks.createTempView("clicks")
    queries.createTempView("queries")
    pairs = session.sql(
        "SELECT * FROM clicks JOIN queries ON primary_id = query_id"
        " AND clicked >= asked AND clicked <= asked + interval 25 hours"
    ).drop("clicked", "asked")
    spark_write(pairs, out, "joined")


if __name__ == "__main__":
    {"duckdb": duckdb, "pathway": pathway, "spark": spark}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
