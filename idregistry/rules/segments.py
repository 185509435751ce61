"""Where ids are: new ones in 256 dicts, later in sorted packed columns of 33 bytes an id. Pure.

    stamp = holder (4) | token time us (8) | bucket (4), little endian; one object for all ids of a request
            that are of one bucket

Nothing is ever deleted from a dict in place: a released id keeps its place with the stamp GONE, so that the
first n rows of a dict are the same ids for as long as the dict lives. Cuts and freezing rest on that. One
dict of millions of ids stops everything while it grows (0.5 s at 5.6 M); 256 of them grow one by one.

Rows of columns are in order of the ids' hash. The hash being even, a table of where each 2^k-th part of its
range begins leads to a row in few steps: 0.1 us an id in ten million, where a binary search takes 1 us.

A Segment is a view: the rows of some Columns that belong to sub-dicts `first` to `end` - 1. While rows are
moved sub by sub into new columns (table.Freezing), the view of the old ones shrinks and that of the new
grows, so that each id has one place at every moment.

A Cut is the state as it was at one moment, drawn later, in another thread, while commands go on. It copies
nothing but references and lengths. What is new stands behind those lengths; what changes in place meanwhile
is noted in the cut first (`note_stamp`, `note_row`), and whoever draws reads first and looks at the notes
afterwards: a change that was seen has been noted. Each read of a dict is one C call, in which no other Python
code runs, so that inserts never disturb it.
"""

import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import DEAD, FEW, SUBS, Encoded, Hashes, bucket_of, buckets_of, split_keys
from photon.core.columns import unpack_times

Sub = dict[bytes, bytes]
Subs = tuple[Sub, ...]

STAMP: Final = struct.Struct("<Iqi")
STAMP_DTYPE: Final = np.dtype([("holder", "<u4"), ("time_us", "<i8"), ("bucket", "<i4")])
GONE: Final = STAMP.pack(0, 0, DEAD)

assert STAMP_DTYPE.itemsize == STAMP.size


def subs_of(subs: Subs, batch: Encoded) -> Iterator[Sub]:
    """The sub-dict of each id."""
    return map(subs.__getitem__, batch.subs)


def stamps_of(subs: Subs, batch: Encoded) -> npt.NDArray[np.void]:
    """N stamps (STAMP_DTYPE), GONE where there is none. Any thread: each step is one under the GIL."""
    return np.frombuffer(b"".join(map(dict.get, subs_of(subs, batch), batch.keys, repeat(GONE))), STAMP_DTYPE)


def new_stamps(
    holders: Sequence[tuple[int, int]], counts: Sequence[int], times: bytes, low_us: int, high_us: int
) -> list[bytes]:
    """N fresh stamps, for each segment its (holder, token time) with the buckets of its `counts[i]` ids.

    `low_us` and `high_us` are the least and the greatest of `times`. Each stamp is an object that was not
    there before.
    """
    bucket = bucket_of(low_us)
    if bucket == bucket_of(high_us):
        stamps = [STAMP.pack(holder, time_us, bucket) for holder, time_us in holders]
        return list(chain.from_iterable(map(repeat, stamps, counts)))
    segments = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    distinct, rows = np.unique(
        (segments << 32) + (buckets_of(unpack_times(times)) - DEAD), return_inverse=True
    )
    stamps = [STAMP.pack(*holders[pair >> 32], (pair & 0xFFFF_FFFF) + DEAD) for pair in distinct.tolist()]
    return list(map(stamps.__getitem__, rows.tolist()))


Numbers = npt.NDArray[np.intp]
"""Rows, by their places in columns."""
Stamps = npt.NDArray[np.void]

_SUB_SHIFT: Final = 56
_HASH_MAX: Final = np.uint64((1 << 64) - 1)
_CELL_IDS: Final = 4  # ids to an entry of the table; fewer steps or less memory
_CELL_BITS_MIN: Final = 8
_LARGE_BYTES: Final = 1 << 20


def array_of(rows: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """`rows` rows of no particular values. MemoryError.

    Large ones get memory of their own: it is taken page by page as they are filled, and goes back to the
    system the moment they are let go, where the allocator would keep it.
    """
    size = rows * np.dtype(kind).itemsize
    if size < _LARGE_BYTES:
        return np.empty(rows, kind)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes: {error}") from error
    return np.frombuffer(memory, kind)


class Columns:
    """Up to `rows` rows, filled sub by sub. One thread writes; others read rows that are there.

    `buckets` change when ids are released; nothing else does, once written.
    """

    def __init__(self, rows: int) -> None:
        # One more: a hash after the last row stops every search.
        self.hashes = array_of(rows + 1, np.uint64)
        self.tails = array_of(rows + 1, np.uint64)
        self.holders = array_of(rows, np.uint32)
        self.times_us = array_of(rows, np.int64)
        self.buckets = array_of(rows, np.int32)
        self.filled = 0
        bits = max(_CELL_BITS_MIN, (rows // _CELL_IDS).bit_length())
        self.shift = np.uint64(64 - bits)
        self._cells_a_sub = 1 << (bits - _CELL_BITS_MIN)
        self.cells = array_of(1 << bits, np.uint32)
        self._stop()

    def append(self, sub: int, rows: "Rows") -> None:
        """All rows of sub-dict `sub`, sorted by hash; the subs come in their order, each once."""
        start = self.filled
        self.extend(rows)
        self._index(start, sub * self._cells_a_sub, self._cells_a_sub)

    def extend(self, rows: "Rows") -> None:
        """Rows that follow those that are there; not found before `index_all`."""
        start, end = self.filled, self.filled + len(rows)
        self.tails[start:end] = rows.tails
        self.holders[start:end] = rows.stamps["holder"]
        self.times_us[start:end] = rows.stamps["time_us"]
        self.buckets[start:end] = rows.stamps["bucket"]
        self.hashes[start:end] = rows.hashes
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

    def stamps(self, rows: slice | Numbers) -> Stamps:
        """A copy of the stamps of these rows."""
        buckets = self.buckets[rows]
        stamps = np.empty(len(buckets), STAMP_DTYPE)
        stamps["holder"] = self.holders[rows]
        stamps["time_us"] = self.times_us[rows]
        stamps["bucket"] = buckets
        return stamps

    def rows(self, start: int, stop: int) -> "Rows":
        """The rows `start` to `stop` - 1, with a copy of their stamps."""
        return Rows(self.hashes[start:stop], self.tails[start:stop], self.stamps(slice(start, stop)))

    def stamp(self, row: int) -> bytes:
        """The stamp of one row."""
        return self.stamps(slice(row, row + 1)).tobytes()

    def release(self, row: int) -> None:
        """The row's id is not there any more."""
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

    def find(self, hashes: Hashes, tails: Hashes) -> Numbers:
        """The row of each id, -1 where there is none. Any thread."""
        if self.first == 0 and self.end == SUBS:
            return self._find(hashes, tails)
        subs = hashes >> np.uint64(_SUB_SHIFT)
        inside = np.flatnonzero((subs >= self.first) & (subs < self.end))
        rows = np.full(len(hashes), -1, np.intp)
        if len(inside):
            rows[inside] = self._find(hashes[inside], tails[inside])
        return rows

    def _find(self, hashes: Hashes, tails: Hashes) -> Numbers:
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

    def _lower_bound(self, hashes: Hashes) -> Numbers:
        columns = self.columns
        at: Numbers
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

    def live(self, rows: Numbers, first_live: int) -> npt.NDArray[np.bool_]:
        """Which of the rows that `find` gave are there and alive."""
        alive: npt.NDArray[np.bool_] = (rows >= 0) & (self.columns.buckets[rows] >= first_live)
        return alive

    def bounds(self) -> list[int]:
        """Where each sub-dict's rows begin, and at last where they end: 257 rows."""
        starts = np.arange(SUBS, dtype=np.uint64) << np.uint64(_SUB_SHIFT)
        inside = self.columns.hashes[self.start : self.stop].searchsorted(starts)
        return [*(inside + self.start).tolist(), self.stop]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where all ids are: each in one sub-dict or one row of a segment. Replaced as a whole, never changed."""

    subs: Subs
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """N ids and their stamps, in order of the ids."""

    hashes: Hashes
    tails: Hashes
    stamps: Stamps

    def __len__(self) -> int:
        return len(self.hashes)

    def part(self, start: int, end: int) -> "Rows":
        """The rows `start` to `end` - 1."""
        return Rows(self.hashes[start:end], self.tails[start:end], self.stamps[start:end])


_NOTHING: Final[Sub] = {}
_NO_ROWS: Final = Rows(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, STAMP_DTYPE))


class Cut:
    """The ids of a layout that are alive at the moment it is made. The thread that changes the state notes
    what it is about to change; the thread that draws draws.
    """

    def __init__(self, layout: Layout, first_live: int) -> None:
        self._subs: list[Sub] = list(layout.subs)
        self._lengths = list(map(len, self._subs))
        self._segments = layout.segments
        self._first_live = first_live
        self._bounds: list[list[int]] = []
        self._drawn = 0
        self._stamps: list[dict[bytes, bytes]] = [{} for _ in range(SUBS)]
        self._rows: list[dict[tuple[Columns, int], bytes]] = [{} for _ in range(SUBS)]

    @property
    def drawn(self) -> bool:
        """Whether all of it is drawn. Any thread."""
        return self._drawn == SUBS

    def note_stamp(self, number: int, sub: Sub, key: bytes, stamp: bytes) -> None:
        """The stamp of `key` in a sub-dict is about to be replaced; it was `stamp`."""
        # Another dict may stand in its place by now: the one the cut holds does not change any more.
        if number >= self._drawn and self._subs[number] is sub:
            self._stamps[number].setdefault(key, stamp)

    def note_row(self, number: int, columns: Columns, row: int) -> None:
        """A row of a segment, of sub-dict `number`, is about to be changed."""
        if number >= self._drawn and (columns, row) not in self._rows[number]:
            self._rows[number][columns, row] = columns.stamp(row)

    def draw(self, number: int) -> Rows:
        """The ids of one sub-dict. Each is drawn once, in order: what is drawn is let go."""
        assert number == self._drawn, "sub-dicts are drawn in their order"
        if number == 0:
            self._bounds = [segment.bounds() for segment in self._segments]
        parts = [self._draw_sub(number)] if self._lengths[number] else []
        for segment, bounds in zip(self._segments, self._bounds, strict=True):
            if bounds[number] < bounds[number + 1]:
                parts.append(self._draw_rows(number, segment.columns, bounds[number], bounds[number + 1]))
        self._drawn = number + 1
        self._subs[number], self._stamps[number], self._rows[number] = _NOTHING, {}, {}
        return in_order(parts, self._first_live)

    def _draw_sub(self, number: int) -> Rows:
        sub, count = self._subs[number], self._lengths[number]
        # Each list by one call, iterator and all: between two, the dict may grow, and an iterator breaks.
        keys = list(sub)[:count]
        stamps = list(sub.values())[:count]
        changed = self._stamps[number].copy()
        if changed:
            stamps = list(map(changed.get, keys, stamps))
        return rows_of(number, keys, stamps)

    def _draw_rows(self, number: int, columns: Columns, start: int, stop: int) -> Rows:
        rows = columns.rows(start, stop)
        for (changed, row), stamp in self._rows[number].copy().items():
            if changed is columns and start <= row < stop:
                rows.stamps[row - start] = np.frombuffer(stamp, STAMP_DTYPE)[0]
        return rows


def rows_of(number: int, keys: list[bytes], stamps: Iterable[bytes]) -> Rows:
    """What is in sub-dict `number`, or in some of it."""
    return Rows(*split_keys(number, keys), np.frombuffer(b"".join(stamps), STAMP_DTYPE))


def together(parts: list[Rows]) -> Rows:
    """All rows of the parts, one after the other."""
    if not parts:
        return _NO_ROWS
    return Rows(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.tails for part in parts]),
        np.concatenate([part.stamps for part in parts]),
    )


def in_order(parts: list[Rows], first_live: int) -> Rows:
    """What of the parts is alive, sorted by hash, and by second half where hashes are equal."""
    if not parts:
        return _NO_ROWS
    all_rows = together(parts)
    hashes, tails, stamps = all_rows.hashes, all_rows.tails, all_rows.stamps
    live = np.flatnonzero(stamps["bucket"] >= first_live)
    order = live[np.argsort(hashes[live])]
    ordered = hashes[order]
    if (ordered[1:] == ordered[:-1]).any():  # rare: sorting by both is slower
        order = live[np.lexsort((tails[live], hashes[live]))]
        ordered = hashes[order]
    return Rows(ordered, tails[order], stamps[order])
