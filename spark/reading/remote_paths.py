"""Which files a pattern on a remote file system (s3a://, hdfs://, gs://) means: Hadoop's own client says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spark.reading.paths import is_uri, local_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def existing(session: "SparkSession", paths: Sequence[str]) -> list[str]:
    """Paths of spark.reading.paths -> the same without patterns, sorted; none for what matches nothing.

    Spark itself takes a pattern without a match for a failure, as if the file system were gone. Raises what
    Spark raises where the file system can't be asked (spark_failures).
    """
    known = [path for path in paths if local_name(path) is not None or not is_uri(path)]
    remote = [path for path in paths if path not in set(known)]
    return [*known, *sorted({found for path in remote for found in _matches(session, path)})]


def _matches(session: "SparkSession", pattern: str) -> list[str]:
    context: Any = session.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(pattern)
    statuses = path.getFileSystem(context._jsc.hadoopConfiguration()).globStatus(path)
    return [str(status.getPath().toString()) for status in statuses or () if status.isFile()]
