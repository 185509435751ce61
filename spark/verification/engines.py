"""Where the rules of verification run: this process and its children (`Here`), for logs that fit a machine.

As Spark (spark.verification.on_spark) it spreads rows over buckets by the hash of an id, then works on one
bucket at a time, so memory is bounded by a bucket. Buckets are files of Arrow in a scratch directory.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from photon.core.columns import hash_ids
from spark.reading.lines import (
    LogSet,
    log_files,
    rows_of_parquet,
    rows_of_ranges,
    split_bytes,
    tasks_of,
)
from spark.verification.accounts import ROW_SCHEMA, backfills_in, details, summary
from spark.verification.facts import registered_rows
from spark.verification.rules import Loser, Total

BY_PRIMARY: Final = "by-primary"
BY_ID: Final = "by-id"
"""Stages: by what the rows are spread. A row without a primary goes by its id."""

Work = Callable[[Any], Any]
"""A bucket -> a table."""

_BUCKET_BYTES: Final = 48 << 20
"""Of logs: the rows are a little less."""
_BUCKETS_MAX: Final = 256
_SPLIT_BYTES: Final = 32 << 20
_ALONE_BYTES: Final = 16 << 20
"""Logs for which no process is worth its start."""
_WORKERS_MAX: Final = 16


class Here:
    """A context. So many buckets in a scratch directory; several workers are processes of their own.

    Rows are read when `spread` returns, as far as files and registry had them then.
    """

    def __init__(self, scratch: Path, buckets: int, workers: int) -> None:
        self._scratch, self._buckets, self._workers = scratch, buckets, workers
        self._pool: Executor | None = None
        self._held = ExitStack()

    @classmethod
    def sized(cls, scratch: Path, log_bytes: int) -> "Here":
        """For so many bytes of logs."""
        cores = len(os.sched_getaffinity(0))
        workers = 1 if log_bytes < _ALONE_BYTES else min(_WORKERS_MAX, cores)
        return cls(scratch, min(_BUCKETS_MAX, 1 + log_bytes // _BUCKET_BYTES), workers)

    def __enter__(self) -> "Here":
        if self._workers > 1:
            # Not forked: this process has threads and channels.
            pool = ProcessPoolExecutor(self._workers, get_context("spawn"))
            self._pool = self._held.enter_context(pool)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._held.close()

    def spread(self, logs: LogSet, stage: str) -> None:
        lines, tables = logs.apart()
        files, _ = log_files(lines.paths)
        tasks = tasks_of(files, split_bytes(files, _SPLIT_BYTES, self._workers))
        self.spread_plan(tasks, partial(rows_of_ranges, lines), stage)
        names = [file.name for file in log_files(tables.paths)[0]]
        self.spread_plan(names, partial(rows_of_parquet, tables), stage)

    def spread_plan(self, plan: Sequence[Any], work: Callable[[Any], Iterator[Any]], stage: str) -> set[int]:
        """A task for each item. The incarnations (signed) of backfills among registered rows."""
        spread = partial(_spread, work, self._scratch / stage, self._buckets)
        return {one for told in self._each(spread, plan) for one in told}

    def spread_export(self, directory: str, stage: str) -> tuple[int, list[int]]:
        """An export's ids; when its scan began, and its shards' boundaries (us)."""
        ids, shards = Path(directory, "ids"), Path(directory, "shards")
        self.spread_plan(sorted(map(str, ids.glob("*.parquet"))), _of_export, stage)
        told = pa.parquet.read_table(shards).to_pylist()
        return told[0]["began_us"], [row["boundary_us"] for row in told]

    def existing(self, paths: Sequence[str]) -> list[str]:
        """Without patterns, and those that match nothing."""
        return list(paths)

    def move(self, source: str, work: Work, target: str) -> None:
        """What `work` makes of the buckets of one stage are rows of another."""
        self.spread_plan(self._places(source), partial(_worked, work), target)

    def judge(self, work: Work) -> tuple[list[Total], list[Loser]]:
        """Of the buckets by id; the accounts are kept for `write`."""
        totals: list[Total] = []
        losers: list[Loser] = []
        for some, others in self._each(partial(_judge, work), self._places(BY_ID)):
            totals += some
            losers += others
        return totals, losers

    def write(self, directory: str, leases: dict[int, str]) -> None:
        """The accounts' details as Parquet, partitioned by verdict."""
        Path(directory).mkdir(parents=True)
        list(self._each(partial(_write, Path(directory), leases), self._places(BY_ID)))

    def _places(self, stage: str) -> list[Path]:
        """The directory of each bucket."""
        return [self._scratch / stage / str(number) for number in range(self._buckets)]

    def _each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        return map(work, items) if self._pool is None else self._pool.map(work, items)


def _of_export(name: str) -> Iterator[Any]:
    with pa.parquet.ParquetFile(name) as file:
        yield from map(registered_rows, file.iter_batches())


_ROWS, _ACCOUNTS = "rows-", "accounts"


def _spread(work: Callable[[Any], Iterator[Any]], stage: Path, buckets: int, item: Any) -> set[int]:
    """Rows of one task go to files of its own: <stage>/<bucket>/rows-<task>."""
    backfills: set[int] = set()
    name = f"{_ROWS}{uuid4().hex}"
    with ExitStack() as held:
        files: dict[int, Any] = {}
        for batch in work(item):
            backfills |= backfills_in(batch)
            for number, rows in _parts(batch, stage.name, buckets):
                if number not in files:
                    directory = stage / str(number)
                    directory.mkdir(parents=True, exist_ok=True)
                    sink = held.enter_context(pa.OSFile(str(directory / name), "wb"))
                    files[number] = held.enter_context(pa.ipc.new_file(sink, ROW_SCHEMA))
                files[number].write_batch(rows)
    return backfills


def _parts(batch: Any, stage: str, buckets: int) -> Iterator[tuple[int, Any]]:
    """The rows of each bucket."""
    if buckets == 1:
        yield 0, batch
        return
    ids = batch.column("key")
    if stage == BY_PRIMARY:
        ids = pc.coalesce(batch.column("primary"), ids)
    numbers = bucket_of(ids, buckets)
    order = np.argsort(numbers, kind="stable")
    rows, ordered = batch.take(pa.array(order)), numbers[order]
    for number in np.unique(ordered).tolist():
        low, high = np.searchsorted(ordered, [number, number + 1])
        yield number, rows.slice(low, high - low)


def bucket_of(ids: Any, buckets: int) -> npt.NDArray[np.int64]:
    """N packed ids -> the bucket of each; 0 for null."""
    filled = pc.fill_null(ids, b"\0" * 16)
    return np.asarray(hash_ids(b"".join(filled.to_pylist())) % np.uint64(buckets), np.int64)


def _bucket(directory: Path) -> Any:
    """All rows that were spread into it."""
    tables = []
    for path in sorted(directory.glob(f"{_ROWS}*")):
        with pa.memory_map(str(path)) as file:
            tables.append(pa.ipc.open_file(file).read_all())
    return pa.concat_tables(tables) if tables else ROW_SCHEMA.empty_table()


def _worked(work: Work, directory: Path) -> Iterator[Any]:
    yield from work(_bucket(directory)).to_batches()


def _judge(work: Work, directory: Path) -> tuple[list[Total], list[Loser]]:
    accounts = work(_bucket(directory))
    directory.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(directory / _ACCOUNTS), "wb") as sink, pa.ipc.new_file(sink, accounts.schema) as file:
        file.write_table(accounts)
    return summary(accounts)


def _write(directory: Path, leases: dict[int, str], bucket: Path) -> None:
    with pa.memory_map(str(bucket / _ACCOUNTS)) as file:
        rows = details(pa.ipc.open_file(file).read_all(), leases)
    for verdict in pc.unique(rows["verdict"]).to_pylist():
        own = directory / f"verdict={verdict}"
        own.mkdir(exist_ok=True)
        of_it = rows.filter(pc.equal(rows["verdict"], verdict)).drop_columns(["verdict"])
        pa.parquet.write_table(of_it, own / f"part-{bucket.name}.parquet")
