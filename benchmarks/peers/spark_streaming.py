"""Spark Structured Streaming: a stream-stream join with a checkpoint, so that it goes on exactly once after a
kill. It forgets queries after a time range; a range of 25 hours loses none of these clicks."""

import os
import sys
from pathlib import Path
from typing import Final

RANGE: Final = "25 hours"
WATERMARK: Final = "10 minutes"
_CLICK: Final = (
    "id STRING, primary_id STRING, ts_us BIGINT, "
    "payload STRUCT<ad: STRING, position: INT, cost_micros: BIGINT>"
)
_QUERY: Final = (
    "id STRING, ts_us BIGINT, payload STRUCT<user: STRING, query: STRING, country: STRING, device: STRING, "
    "results: BIGINT, latency_ms: DOUBLE, ads: ARRAY<STRING>>"
)


def main(logs: Path, out: Path) -> None:
    """Joins what is there when it starts (`availableNow`), and ends."""
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col, expr, timestamp_micros

    cores = os.cpu_count() or 1
    session = (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.sql.shuffle.partitions", 2 * cores)
        .config("spark.driver.memory", "6g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(out / "local"))
        .config("spark.sql.warehouse.dir", str(out / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    clicks = (
        session.readStream.schema(_CLICK)
        .json(str(logs / "clicks"))
        .withColumnRenamed("id", "click_id")
        .withColumn("clicked", timestamp_micros(col("ts_us")))
        .withWatermark("clicked", WATERMARK)
    )
    queries = (
        session.readStream.schema(_QUERY)
        .json(str(logs / "queries"))
        .select(
            col("id").alias("query_id"),
            col("ts_us").alias("query_ts_us"),
            col("payload").alias("query_payload"),
            timestamp_micros(col("ts_us")).alias("asked"),
        )
        .withWatermark("asked", WATERMARK)
    )
    pairs = clicks.join(
        queries,
        expr(f"primary_id = query_id AND clicked >= asked AND clicked <= asked + interval {RANGE}"),
    ).drop("clicked", "asked")
    query = (
        pairs.writeStream.format("json")
        .option("path", str(out / "joined"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
