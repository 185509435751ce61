"""Log lines with their places, parsed by Photon's own code, as DataFrames.

Local files are read by the executors' Python in byte ranges, straight into columns: a line is what
photon.core.formats makes of it, and no row goes through the JVM before it is packed. What has a URI (s3a://,
hdfs://) Spark reads and Photon parses.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from photon.core.settings import Settings
from spark.engine.arrow import map_in_arrow
from spark.reading.columns import FOREIGN_SCHEMA, PRIMARY_SCHEMA
from spark.reading.parsing import ChunkParser, Parser
from spark.reading.range_reading import chunks_of
from spark.reading.ranges import LogFile, Range, local_file, split_bytes, tasks_of
from spark.reading.remote_reading import remote_events

_ESCAPED: Final = re.compile(r"\\(.)")
_WILDCARD: Final = re.compile(r"(?<!\\)[*?\[\]{}]")
_SIZES: Final = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parsed_primaries(
    session: SparkSession, paths: Sequence[str], settings: Settings, key: bytes, unended: bool = False
) -> DataFrame:
    """-> path, start (of the line in the unpacked file), length, id (16 bytes), line, reason.

    `paths` as spark.reading.paths.input_paths makes them. `reason` is null for an event. A malformed line,
    by the judgement of photon.core.formats, has no id; of one longer than logs.line_bytes_max the beginning
    is kept. Blank lines are left out. `unended`: a last line without its newline is one if it is a JSON
    object, as it always is in an archive. `path` is a local name, or a URI where Spark reads.

    Local files are read as far as they go now, in every job of the DataFrame.
    """
    make = partial(ChunkParser, settings, key, foreign=False)
    return parsed(session, paths, settings, make, PRIMARY_SCHEMA, unended)


def parsed_foreign(
    session: SparkSession, paths: Sequence[str], settings: Settings, key: bytes, unended: bool = False
) -> DataFrame:
    """-> path, start, length, id, primary_id (16 bytes), time_us, line, reason. As parsed_primaries."""
    make = partial(ChunkParser, settings, key, foreign=True)
    return parsed(session, paths, settings, make, FOREIGN_SCHEMA, unended)


def log_files(paths: Sequence[str]) -> tuple[list[LogFile], list[str]]:
    """Those that Python reads, as they are now; and the rest, which are Spark's. StorageError."""
    local = [path for path in paths if path.startswith("file:///") and not _WILDCARD.search(path)]
    files = [local_file(_ESCAPED.sub(r"\1", path.removeprefix("file://"))) for path in local]
    known = set(local)
    return files, [path for path in paths if path not in known]


def plan(session: SparkSession, files: Sequence[LogFile]) -> list[list[Range]]:
    """What each task reads: spark.sql.files.maxPartitionBytes, or less."""
    most = split_bytes_max(session)
    return tasks_of(files, split_bytes(files, most, session.sparkContext.defaultParallelism))


def run(
    session: SparkSession, planned: Sequence[Any], work: Callable[[Any], Iterator[Any]], schema: str
) -> DataFrame:
    """A task for each that is planned; `work` makes record batches of it, on the executors."""
    if not planned:
        return session.createDataFrame([], schema)
    plans = list(planned)

    def batches(numbers: Iterable[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from work(plans[number])

    return map_in_arrow(session.range(0, len(plans), 1, len(plans)).toDF("task"), batches, schema)


def split_bytes_max(session: SparkSession) -> int:
    """As Spark's setting says it: 128m, 134217728b, 134217728."""
    text = session.conf.get("spark.sql.files.maxPartitionBytes") or "128m"
    found = re.fullmatch(r"(\d+)([bkmgt]?)b?", text.strip().lower())
    assert found is not None, "Spark has checked it"
    return int(found[1]) * _SIZES[found[2] or "b"]


def parsed(
    session: SparkSession,
    paths: Sequence[str],
    settings: Settings,
    make: Callable[[], Parser],
    schema: str,
    unended: bool,
) -> DataFrame:
    """What parsers make of the files, `schema`; one is made for each task. `unended` as parsed_primaries."""
    files, uris = log_files(paths)

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = make()
        for one in ranges:
            for path, chunk in chunks_of(one, settings.logs, unended):
                yield from parser.columns(one.file.name, path, chunk)

    read = run(session, plan(session, files), work, schema)
    if not uris:
        return read
    remote = remote_events(session, uris, settings, make, unended, schema, split_bytes_max(session))
    return remote if not files else read.unionByName(remote)
