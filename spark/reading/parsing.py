"""Chunks of whole lines to record batches, by Photon's own parser. On the executors.

Packed columns become Arrow arrays without a Python statement for each row.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from photon.core.ids import ID_BYTES, IdPacker
from photon.core.settings import Settings
from photon.logs.files import Chunk
from photon.logs.formats import ForeignBatch, Malformed, PrimaryBatch, json_lines
from spark.reading.ranges import beginning

PRIMARY_SCHEMA = "path string, start long, length int, id binary, line binary, reason string"
FOREIGN_SCHEMA = (
    "path string, start long, length int, id binary, primary_id binary, time_us long, line binary, "
    "reason string"
)


def fixed_binary(column: bytes, width: int = ID_BYTES) -> Any:
    """width x N bytes -> a binary array of N values; the bytes are not copied."""
    count = len(column) // width
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(column)])


def primary_columns(path: str, start: int, batch: PrimaryBatch) -> list[Any]:
    """The record batches of a chunk that begins at `start`: of its events, and of its malformed lines."""
    found = []
    if batch.lines:
        found.append(_events(path, start, batch, {"id": fixed_binary(batch.ids)}))
    if batch.malformed:
        found.append(malformed_columns(path, start, batch.malformed, {"id": pa.binary()}))
    return found


def foreign_columns(path: str, start: int, batch: ForeignBatch) -> list[Any]:
    """As primary_columns."""
    found = []
    if batch.lines:
        columns = {
            "id": fixed_binary(batch.ids),
            "primary_id": fixed_binary(batch.primary_ids),
            "time_us": pa.array(np.frombuffer(batch.times, "<i8")),
        }
        found.append(_events(path, start, batch, columns))
    if batch.malformed:
        none = {"id": pa.binary(), "primary_id": pa.binary(), "time_us": pa.int64()}
        found.append(malformed_columns(path, start, batch.malformed, none))
    return found


def _events(path: str, start: int, batch: PrimaryBatch | ForeignBatch, columns: dict[str, Any]) -> Any:
    lengths = np.fromiter(map(len, batch.lines), np.int32, len(batch.lines))
    lines = pa.array(batch.lines, pa.binary())
    return _placed(path, batch.starts + start, lengths, columns, lines, pa.nulls(len(lengths), pa.string()))


def malformed_columns(path: str, start: int, bad: Sequence[Malformed], none: dict[str, Any]) -> Any:
    """Rows without ids: `none` names those columns and their types."""
    starts = np.array([one.start + start for one in bad], np.int64)
    lengths = np.array([len(one.line) for one in bad], np.int32)
    columns = {name: pa.nulls(len(bad), kind) for name, kind in none.items()}
    reasons = pa.array([one.reason for one in bad], pa.string())
    return _placed(path, starts, lengths, columns, pa.array([one.line for one in bad], pa.binary()), reasons)


def _placed(path: str, starts: Any, lengths: Any, columns: dict[str, Any], lines: Any, reasons: Any) -> Any:
    placed = {
        "path": pa.repeat(pa.scalar(path, pa.string()), len(starts)),
        "start": pa.array(starts),
        "length": pa.array(lengths),
        **columns,
        "line": lines,
        "reason": reasons,
    }
    return pa.RecordBatch.from_arrays(list(placed.values()), names=list(placed))


# --- parsers

OVERSIZED_KEPT_BYTES: Final = 1024
"""Of a line that is longer than logs.line_bytes_max."""


class Parser(Protocol):
    """Makes record batches of chunks. For one thread."""

    def columns(self, name: str, path: str, chunk: Chunk) -> list[Any]:
        """`name` is the log's; `path` is what was read."""
        ...


class ChunkParser:
    """For one thread, as a packer of ids is."""

    def __init__(self, settings: Settings, key: bytes, foreign: bool) -> None:
        self._lines = json_lines(settings, IdPacker(key))
        self._line_bytes_max = settings.logs.line_bytes_max
        self._foreign = foreign

    def columns(self, name: str, path: str, chunk: Chunk) -> list[Any]:
        """Record batches of the chunk's events and of its malformed lines."""
        batch = self.batch(path, chunk)
        if isinstance(batch, ForeignBatch):
            return foreign_columns(name, chunk.start, batch)
        return primary_columns(name, chunk.start, batch)

    def batch(self, path: str, chunk: Chunk) -> PrimaryBatch | ForeignBatch:
        """`path` is what was read. Places are offsets in the chunk."""
        data = b"" if chunk.oversized else chunk.data
        batch = self._lines.parse_foreign(data) if self._foreign else self._lines.parse_primary(data)
        if chunk.oversized:
            batch.malformed.append(self._oversized(path, chunk))
        return batch

    def _oversized(self, path: str, chunk: Chunk) -> Malformed:
        """Its data, if any, are its beginning."""
        reason = (
            f"line of {chunk.end - chunk.start} bytes, 'logs.line_bytes_max' is "
            f"{self._line_bytes_max}; only its beginning is kept here"
        )
        kept = chunk.data or beginning(path, chunk.start, OVERSIZED_KEPT_BYTES)
        return Malformed(0, kept, reason)
