"""Chunks of whole lines to record batches, by Photon's own parser. On the executors."""

from typing import Any, Final, Protocol

from photon.core.chunks import Chunk
from photon.core.formats import ForeignBatch, Malformed, PrimaryBatch, json_lines
from photon.core.ids import IdPacker
from photon.core.settings import Settings
from spark.reading.columns import foreign_columns, primary_columns
from spark.reading.range_reading import beginning

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
