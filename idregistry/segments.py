"""Ids that are no longer new: sorted packed columns, 21 bytes an id, 33 with a token. Pure.

Rows are in order of the ids' hash. The hash being even, a table of where each 2^k-th part of its range begins
leads to a row in few steps: 0.1 us an id in ten million, where a binary search takes 1 us.

A Segment is a view: the rows of some Columns that belong to sub-dicts `first` to `end` - 1. While rows are
moved sub by sub into new columns (idregistry.freezing), the view of the old ones shrinks and that of the new
grows, so that each id has one place at every moment.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.arrays import array_of
from idregistry.buckets import DEAD
from idregistry.encoding import FEW, SUBS, Hashes
from idregistry.holding import Holding, Rows, Stamps
from idregistry.recent import STAMP_DTYPE

ROW_BYTES: Final = 8 + 8 + 4
"""Of an id, without its token."""

_SUB_SHIFT: Final = 56
_HASH_MAX: Final = np.uint64((1 << 64) - 1)
_CELL_IDS: Final = 4  # ids to an entry of the table; fewer steps or less memory
_CELL_BITS_MIN: Final = 8


class Columns:
    """Up to `rows` rows with up to `tokens` tokens, filled sub by sub. One thread writes; others read rows
    that are there.

    `hashes` and `tails` never change once written, the tokens and `buckets` may.
    """

    def __init__(self, rows: int, tokens: int | None = None) -> None:
        # One more: a hash after the last row stops every search.
        self.hashes = array_of(rows + 1, np.uint64)
        self.tails = array_of(rows + 1, np.uint64)
        self.holding = Holding(rows if tokens is None else tokens)
        self.compacted: Holding | None = None
        """What is to take its place, while it is being filled."""
        self.buckets = array_of(rows, np.int32)
        self.filled = 0
        bits = max(_CELL_BITS_MIN, (rows // _CELL_IDS).bit_length())
        self.shift = np.uint64(64 - bits)
        self._cells_a_sub = 1 << (bits - _CELL_BITS_MIN)
        self.cells = array_of(1 << bits, np.uint32)
        self._stop()

    def append(self, sub: int, hashes: Hashes, tails: Hashes, stamps: Stamps) -> None:
        """All rows of sub-dict `sub`, sorted by hash; the subs come in their order, each once."""
        start = self.filled
        self.extend(hashes, tails, stamps)
        self._index(start, sub * self._cells_a_sub, self._cells_a_sub)

    def skip(self, sub: int) -> None:
        """Sub-dict `sub` has no rows."""
        first = sub * self._cells_a_sub
        self.cells[first : first + self._cells_a_sub] = self.filled

    def extend(self, hashes: Hashes, tails: Hashes, stamps: Stamps) -> None:
        """Rows that follow those that are there; not found before `index_all`."""
        start, end = self.filled, self.filled + len(hashes)
        self.tails[start:end] = tails
        self.holding.extend(start, stamps)
        self.buckets[start:end] = stamps["bucket"]
        self.hashes[start:end] = hashes
        self.filled = end
        self._stop()

    def index_all(self) -> None:
        """All rows are there."""
        self._index(0, 0, len(self.cells))

    def _index(self, start: int, first: int, count: int) -> None:
        """Where the parts `first` to `first + count - 1` begin; their rows are those from `start` on."""
        parts = (self.hashes[start : self.filled] >> self.shift).astype(np.intp) - first
        ends = np.cumsum(np.bincount(parts, minlength=count)) + start
        self.cells[first] = start
        self.cells[first + 1 : first + count] = ends[:-1]

    def _stop(self) -> None:
        self.hashes[self.filled] = _HASH_MAX

    def stamps(self, start: int, end: int) -> Stamps:
        """A copy of the stamps of rows `start` to `end` - 1."""
        stamps = np.zeros(end - start, STAMP_DTYPE)
        stamps["bucket"] = self.buckets[start:end]
        self.holding.fill(start, stamps)
        return stamps

    def stamps_of(self, rows: Rows) -> Stamps:
        """The stamps of any rows."""
        stamps = np.zeros(len(rows), STAMP_DTYPE)
        stamps["bucket"] = self.buckets[rows]
        self.holding.take(rows, stamps)
        return stamps

    def stamp(self, row: int) -> bytes:
        """The stamp of one row."""
        return self.stamps(row, row + 1).tobytes()

    def clear(self, rows: Rows) -> None:
        """Take the tokens of these rows."""
        self.holding.clear(rows)
        if self.compacted is not None:
            self.compacted.clear(rows)

    def release(self, row: int) -> None:
        """The row's id is not there any more."""
        self.clear(np.array((row,), np.intp))
        self.buckets[row] = DEAD


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rows `start` to `stop` - 1 of `columns`: all that it has of the sub-dicts `first` to `end` - 1."""

    columns: Columns
    first: int
    end: int
    start: int
    stop: int

    @property
    def ids(self) -> int:
        """How many rows, the dead among them."""
        return self.stop - self.start

    def find(self, hashes: Hashes, tails: Hashes) -> Rows:
        """The row of each id, -1 where there is none. Any thread."""
        if self.first == 0 and self.end == SUBS:
            return self._find(hashes, tails)
        subs = hashes >> np.uint64(_SUB_SHIFT)
        inside = np.flatnonzero((subs >= self.first) & (subs < self.end))
        rows = np.full(len(hashes), -1, np.intp)
        if len(inside):
            rows[inside] = self._find(hashes[inside], tails[inside])
        return rows

    def _find(self, hashes: Hashes, tails: Hashes) -> Rows:
        columns = self.columns
        at = self._lower_bound(hashes)
        here = columns.hashes[at] == hashes
        found: npt.NDArray[np.bool_] = here & (columns.tails[at] == tails)
        # Ids of one hash stand side by side.
        while (others := here & ~found & (at + 1 < self.stop)).any():
            at += others
            here = others & (columns.hashes[at] == hashes)
            found |= here & (columns.tails[at] == tails)
        return np.where(found & (at < self.stop), at, -1)

    def _lower_bound(self, hashes: Hashes) -> Rows:
        columns = self.columns
        at: Rows
        if len(hashes) <= FEW:
            at = columns.hashes[self.start : self.stop].searchsorted(hashes)
            at += self.start
            return at
        at = columns.cells[hashes >> columns.shift].astype(np.intp)
        less = columns.hashes[at] < hashes
        while less.any():
            at += less
            less = columns.hashes[at] < hashes
        return at

    def live(self, rows: Rows, first_live: int) -> npt.NDArray[np.bool_]:
        """Which of the rows that `find` gave are there and alive."""
        alive: npt.NDArray[np.bool_] = (rows >= 0) & (self.columns.buckets[rows] >= first_live)
        return alive

    def bounds(self) -> list[int]:
        """Where each sub-dict's rows begin, and at last where they end: 257 rows."""
        starts = np.arange(SUBS, dtype=np.uint64) << np.uint64(_SUB_SHIFT)
        inside = self.columns.hashes[self.start : self.stop].searchsorted(starts)
        return [*(inside + self.start).tolist(), self.stop]
