"""`python -m tests.spark.classes`: what a JVM of Spark's makes of its classes, for those that tests start.

Half of a command's CPU went there. A JVM passes over an archive of other classes than its own.
"""

import tempfile

from photon.core.errors import PhotonError
from spark.options import SparkOptions
from spark.session import map_in_arrow, open_session, spark_failures
from tests.spark.cluster import CLASSES, QUICK


def make():
    new = CLASSES.with_suffix(".partial")
    java = {"spark.driver.extraJavaOptions": f"{QUICK} -XX:ArchiveClassesAtExit={new} -Xlog:disable"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_session(SparkOptions("local[2]", "768m", java)) as session,
        spark_failures(),
    ):
        jvm = session.sparkContext._gateway.proc
        use(session, scratch)
        session.stop()
        jvm.stdin.close()
        jvm.wait()  # it writes for longer than a session waits for it
    if new.exists():  # not every JVM makes one
        new.rename(CLASSES)


def use(session, scratch):
    """About what the commands do."""
    from pyspark.sql import functions as F

    columns = F.col("id"), (F.col("id") % 7).alias("key"), F.col("id").cast("string").alias("text")
    rows = session.range(1000).select(*columns)
    rows.select("text").write.text(f"{scratch}/text")
    rows.write.partitionBy("key").parquet(f"{scratch}/rows")
    rows.repartitionByRange(2, "id").sortWithinPartitions("id").write.json(f"{scratch}/json")
    read = session.read.parquet(f"{scratch}/rows")
    found = read.join(session.read.text(f"{scratch}/text"), F.col("text") == F.col("value"))
    counted = found.groupBy("key").agg(F.count("*").alias("rows"), F.max("id").alias("most"))
    map_in_arrow(counted, iter, counted.schema).repartition(2, "key").sortWithinPartitions("key").collect()
    lines = session.readStream.schema("value string").text(f"{scratch}/text").writeStream
    query = lines.foreachBatch(lambda batch, _: batch.count()).trigger(availableNow=True)
    query.option("checkpointLocation", f"{scratch}/places").start().awaitTermination()


if __name__ == "__main__":
    try:
        make()
    except PhotonError as error:
        print(f"Spark's JVMs start without an archive of their classes: {error}")
