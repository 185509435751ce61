"""Sorted rows of the log file map -> its files, a partition each. On the executors.

A file has a name of its own in every attempt: the driver lists those of the attempts that counted.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from eventstore.built_map import levels_of, records_of, write_durably, write_sparse
from eventstore.segments import Columns, Writer
from spark.engine.arrow import map_in_arrow

SCHEMA: Final = "name string, entries long, level int, part int"
"""Of what was written; files go in the order of level and part."""

Work = Callable[[Iterable[Any]], Iterator[Any]]


def write_sparse_parts(runs: DataFrame, directory: Path, interval_us: int) -> DataFrame:
    """From spark.logmap.jobs.sorted_sparse."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_records(batch) for batch in batches if batch.num_rows]
        if not found:
            return
        records = np.concatenate(found)
        levels = levels_of(records, interval_us)
        for level in np.unique(levels).tolist():
            name = _name("sparse")
            part = records[levels == level]
            write_sparse(directory / name, part)
            yield _written(name, len(part), level)

    return map_in_arrow(runs, write, SCHEMA)


def write_dense_parts(opaque: DataFrame, directory: Path) -> DataFrame:
    """From spark.logmap.jobs.sorted_dense."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_columns(batch) for batch in batches if batch.num_rows]
        count = sum(map(len, found))
        if not count:
            return
        name = _name("dense")
        writer = Writer(directory / name, count)
        for columns in found:
            writer.append(columns)
        writer.close()
        yield _written(name, count)

    return map_in_arrow(opaque, write, SCHEMA)


def write_letters(letters: DataFrame, directory: Path) -> DataFrame:
    """From spark.logmap.jobs.sorted_letters."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        name, count = f"{_name('malformed')}.jsonl", 0
        lines = []
        for batch in batches:
            lines += batch.column(0).to_pylist()
            count += batch.num_rows
        if count:
            write_durably(directory / name, b"".join(lines))
            yield _written(name, count)

    return map_in_arrow(letters, write, SCHEMA)


def _records(batch: Any) -> Any:
    columns = {
        name: batch.column(batch.schema.get_field_index(name)) for name in ("id", "a", "file", "c", "b", "d")
    }
    numbers = {name: column.to_numpy() for name, column in columns.items() if name != "id"}
    return records_of(
        server=_bytes_of(batch.column("id"), ">u8"),
        earliest=numbers["a"],
        file=numbers["file"],
        start=numbers["c"],
        length=numbers["d"] - numbers["c"],
        latest=numbers["b"],
    )


def _columns(batch: Any) -> Columns:
    halves = _bytes_of(batch.column(0), ">u8").astype(np.uint64)
    file, start, length = (batch.column(n).to_numpy() for n in (1, 2, 3))
    return Columns(
        halves[0::2], halves[1::2], start.astype(np.uint64), file.astype(np.uint32), length.astype(np.uint32)
    )


def _bytes_of(column: Any, dtype: str) -> Any:
    """Of a binary column whose values have all one width: its bytes as numbers."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].view(dtype)


def _name(kind: str) -> str:
    return f"{kind}-{_part():05d}-{secrets.token_hex(6)}"


def _part() -> int:
    context = TaskContext.get()
    assert context is not None, "on an executor"
    return int(context.partitionId())


def _written(name: str, count: int, level: int = 0) -> Any:
    columns = [
        pa.array([name]),
        pa.array([count], pa.int64()),
        pa.array([level], pa.int32()),
        pa.array([_part()], pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["name", "entries", "level", "part"])
