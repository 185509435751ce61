"""What users would take instead, from topics to a topic, each by an interpreter that has it.

    python -m benchmarks.kafka_peers NAME BROKERS QUERIES CLICKS PAIRS DIRECTORY

joins clicks with their queries, topics that are keyed by the query's id, and goes on until it is killed; a
pair is a record {"click": .., "query": ..}. Started again with the same arguments it goes on where it was.
Imports nothing of Photon's.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

DAY_AND_MORE = timedelta(hours=25)


def quix(brokers: str, queries: str, clicks: str, pairs: str, directory: Path) -> None:
    """Quix Streams: an interval join with state in RocksDB and changelog topics, exactly once."""
    from quixstreams import Application

    app = Application(
        broker_address=brokers,
        consumer_group=f"{pairs}.quix",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=0.1,  # as Kafka Streams does
        state_dir=directory / "state",
        loglevel="WARNING",
    )
    of_clicks, of_queries = (
        app.dataframe(app.topic(name, value_deserializer="json")) for name in (clicks, queries)
    )
    joined = of_clicks.join_interval(
        of_queries,
        on_merge=lambda click, query: {"click": click, "query": query},
        grace_ms=DAY_AND_MORE + timedelta(hours=1),
        backward_ms=DAY_AND_MORE,
        forward_ms=DAY_AND_MORE,
    )
    joined.to_topic(app.topic(pairs, value_serializer="json"))
    app.run()


def spark(brokers: str, queries: str, clicks: str, pairs: str, directory: Path) -> None:
    """Spark Structured Streaming: a stream-stream join with a checkpoint; its Kafka sink is at least once."""
    from pyspark.sql import SparkSession

    cores = os.cpu_count() or 1
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, Any] = {
        "spark.jars": ",".join(map(str, Path(os.environ["SPARK_KAFKA_JARS"]).glob("*.jar"))),
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.driver.memory": "4g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(directory / "local"),
        "spark.log.level": "ERROR",
    }
    session = SparkSession.builder.master(f"local[{cores}]").config(map=settings).getOrCreate()

    def stream(topic: str, name: str, moment: str) -> Any:
        read = session.readStream.format("kafka").option("kafka.bootstrap.servers", brokers)
        rows = read.option("subscribe", topic).option("startingOffsets", "earliest").load()
        columns = (f"key AS {name}_key", f"CAST(value AS STRING) AS {name}", f"timestamp AS {moment}")
        return rows.selectExpr(*columns).withWatermark(moment, "1 hour")

    stream(clicks, "click", "clicked").createTempView("clicks")
    stream(queries, "query", "asked").createTempView("queries")
    found = session.sql(
        """SELECT concat('{"click":', click, ',"query":', query, '}') AS value
        FROM clicks JOIN queries ON click_key = query_key
        AND clicked >= asked - interval 25 hours AND clicked <= asked + interval 25 hours"""
    )
    write = found.writeStream.format("kafka").option("kafka.bootstrap.servers", brokers)
    write = write.option("topic", pairs).option("checkpointLocation", str(directory / "checkpoint"))
    write.start().awaitTermination()


if __name__ == "__main__":
    _, peer, *topics, place = sys.argv
    brokers, queries, clicks, pairs = topics
    {"quix": quix, "spark": spark}[peer](brokers, queries, clicks, pairs, Path(place))
