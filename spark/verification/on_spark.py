"""The rules of verification on Spark: the buckets are the partitions of a shuffle."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark.reading.events import parsed, run
from spark.reading.lines import LogSet, log_files
from spark.reading.paths import existing
from spark.registered import read_export
from spark.session import map_in_arrow
from spark.verification.accounts import ACCOUNT_SCHEMA, ROW_SCHEMA, backfills_in, details, summary
from spark.verification.engines import BY_ID, BY_PRIMARY, Work
from spark.verification.facts import registered_rows
from spark.verification.rules import Loser, Total

_PARTITION_BYTES: Final = 96 << 20
"""Of logs: a bucket is a table in the memory of an executor's Python."""
ROW: Final = from_arrow_schema(ROW_SCHEMA)
_ACCOUNT: Final = from_arrow_schema(ACCOUNT_SCHEMA)
_DETAILS: Final = from_arrow_schema(details(ACCOUNT_SCHEMA.empty_table(), {}).schema)


class OnSpark:
    """As spark.verification.engines.Here. A context; SparkFailedError where a job fails (spark_failures)."""

    def __init__(self, session: SparkSession, log_bytes: int) -> None:
        self._session = session
        least = int(session.conf.get("spark.sql.shuffle.partitions") or 2)
        self._partitions = max(least, 1 + log_bytes // _PARTITION_BYTES)
        self._frames: dict[str, list[DataFrame]] = {BY_PRIMARY: [], BY_ID: []}
        self._kept = ExitStack()
        self._accounts: DataFrame | None = None

    def __enter__(self) -> "OnSpark":
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def spread(self, logs: LogSet, stage: str) -> None:
        self._frames[stage].append(parsed(self._session, logs, ROW))
        if log_files(logs.paths)[1]:  # local files are read to where they end now in any case
            self._keep(self._frames[stage].pop(), stage)

    def spread_plan(self, plan: Sequence[Any], work: Callable[[Any], Iterator[Any]], stage: str) -> set[int]:
        return self.spread_frame(run(self._session, plan, work, ROW), stage)

    def spread_export(self, directory: str, stage: str) -> tuple[int, list[int]]:
        export = read_export(self._session, directory)
        ids = export.ids.select("id", "address", "incarnation", "token_us")
        self.spread_frame(map_in_arrow(ids, _of_export, ROW), stage)
        return export.began_us, [*export.boundaries.values()]

    def existing(self, paths: Sequence[str]) -> list[str]:
        return existing(self._session, paths)

    def spread_frame(self, rows: DataFrame, stage: str) -> set[int]:
        """As spread_plan, of rows of ROW."""
        rows = self._keep(rows, stage)
        found = map_in_arrow(rows.select("address", "incarnation"), _on_whole(_backfills), "incarnation long")
        return {row.incarnation for row in found.distinct().collect()}

    def move(self, source: str, work: Work, target: str) -> None:
        self._frames[target].append(self._worked(source, work, ROW))

    def judge(self, work: Work) -> tuple[list[Total], list[Loser]]:
        accounts = self._worked(BY_ID, work, _ACCOUNT).persist(StorageLevel.DISK_ONLY)
        self._kept.callback(accounts.unpersist)
        self._accounts = accounts
        told = map_in_arrow(accounts, _on_whole(_summary), "summary string").collect()
        found = [msgspec.json.decode(row.summary, type=tuple[list[Total], list[Loser]]) for row in told]
        return [one for totals, _ in found for one in totals], [one for _, losers in found for one in losers]

    def write(self, directory: str, leases: dict[int, str]) -> None:
        assert self._accounts is not None
        rows = map_in_arrow(self._accounts, _on_whole(partial(details, leases=leases)), _DETAILS)
        rows.write.partitionBy("verdict").parquet(directory)

    def _keep(self, rows: DataFrame, stage: str) -> DataFrame:
        kept = rows.persist(StorageLevel.DISK_ONLY)
        self._kept.callback(kept.unpersist)
        kept.count()
        self._frames[stage].append(kept)
        return kept

    def _worked(self, stage: str, work: Work, schema: StructType) -> DataFrame:
        key = F.coalesce("primary", "key") if stage == BY_PRIMARY else F.col("key")
        rows = reduce(DataFrame.unionByName, self._frames[stage]).select(*ROW_SCHEMA.names)
        return map_in_arrow(rows.repartition(self._partitions, key), _on_whole(work), schema)


def _of_export(batches: Iterable[Any]) -> Iterator[Any]:
    return map(registered_rows, batches)


def _on_whole(work: Work) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """`work` of all rows of a partition at once."""

    def of_partition(batches: Iterable[Any]) -> Iterator[Any]:
        if held := list(batches):
            yield from work(pa.Table.from_batches(held)).to_batches()

    return of_partition


def _summary(accounts: Any) -> Any:
    return pa.table({"summary": [msgspec.json.encode(summary(accounts)).decode()]})


def _backfills(rows: Any) -> Any:
    return pa.table({"incarnation": pa.array([*backfills_in(rows)], pa.int64())})
