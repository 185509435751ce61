"""Which events stand in a complete file of the joined log: their ids and times, as they were registered.

They are parsed from the joined lines by the settings for foreign events, of which the default joined line is
one with a field more. An adapter may write something else: lines without the fields tell nothing.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from joiner import parquet
from joiner.adapter import Adapter
from joiner.output_files import PARQUET
from photon.core.chunks import read_chunk
from photon.core.columns import take_ids, take_times
from photon.core.formats import JsonLines
from photon.core.ids import ID_BYTES, IdPacker
from photon.core.settings import Settings

BLOCK_BYTES: Final = 256 << 10
BLOCKS_MAX: Final = 64
"""In a part: lines may tell no ids."""
ROWS_MAX: Final = 1024
"""Of a Parquet file. Few, as other threads wait while a block is parsed."""
_LINE_BYTES_MAX: Final = 65 << 20
"""Longer than any event that is read, with its primary event in it."""


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """N events of a file: 16 x N ids, 8 x N times; how many more lines there were that tell no id; where it
    ends: bytes of a file of lines, rows of a Parquet file."""

    ids: bytes
    times: bytes
    unclearable: int
    end: int


class JoinedIds:
    """Reads complete files. Not for several threads at once."""

    def __init__(self, settings: Settings, adapter: Adapter) -> None:
        """SettingsError for field paths that can't be."""
        foreign = settings.foreign
        self._lines = JsonLines(settings.primary, foreign, IdPacker(settings.ids.key.encode()))
        self._columns = [*dict.fromkeys([foreign.id, foreign.primary_id, foreign.time])]
        self._only_splices = type(adapter).join is Adapter.join

    def parts(
        self, path: Path, start: int, ids_min: int, rest: Callable[[], None] = lambda: None
    ) -> Iterator[JoinedPart]:
        """What stands after `start` (a part's `end`, or 0), oldest first, in parts of `ids_min` or some more.

        `rest` is called between blocks. A last line without its newline is left out. OSError; ImportError
        without pyarrow for Parquet.
        """
        blocks = self._rows(path, start) if path.suffix == PARQUET else self._chunks(path, start)
        held: list[JoinedPart] = []
        for block in blocks:
            held.append(block)
            rest()
            if len(held) >= BLOCKS_MAX or sum(len(part.ids) for part in held) >= ID_BYTES * ids_min:
                yield _together(held)
                held.clear()
        if held:
            yield _together(held)

    def _chunks(self, path: Path, start: int) -> Iterator[JoinedPart]:
        while (chunk := read_chunk(str(path), start, BLOCK_BYTES, _LINE_BYTES_MAX)) is not None:
            start = chunk.end
            yield JoinedPart(b"", b"", 1, start) if chunk.oversized else self._parsed(chunk.data, start)

    def _rows(self, path: Path, start: int) -> Iterator[JoinedPart]:
        read = importlib.import_module("pyarrow.parquet")
        with read.ParquetFile(path) as file:
            plain = file.schema_arrow.names == [parquet.COLUMN]
            columns = [parquet.COLUMN] if plain else [name.replace("..", ".") for name in self._columns]
            at = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if start < at + count:
                    table = file.read_row_group(group, columns, use_threads=False)
                    for low in range(max(0, start - at), count, ROWS_MAX):
                        lines = parquet.as_lines(table.slice(low, ROWS_MAX).to_pylist(), plain)
                        yield self._parsed(lines, at + min(count, low + ROWS_MAX))
                at += count

    def _parsed(self, lines: bytes, end: int) -> JoinedPart:
        found = self._lines.parse_foreign(lines)
        ids, times, unclearable = found.ids, found.times, len(found.malformed)
        if not self._only_splices:
            # An adapter that merges two events may have put the primary event's id over the foreign one's.
            own = np.frombuffer(ids, f"V{ID_BYTES}") != np.frombuffer(found.primary_ids, f"V{ID_BYTES}")
            if not own.all():
                unclearable += int(np.count_nonzero(~own))
                ids, times = take_ids(ids, own), take_times(times, own)
        return JoinedPart(ids, times, unclearable, end)


def _together(parts: Sequence[JoinedPart]) -> JoinedPart:
    return JoinedPart(
        b"".join([part.ids for part in parts]),
        b"".join([part.times for part in parts]),
        sum(part.unclearable for part in parts),
        parts[-1].end,
    )
