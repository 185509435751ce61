"""A cut: the state as it was at one moment, drawn later, in another thread, while commands go on. Pure.

It copies nothing but references and lengths. What is new stands behind those lengths; what is changed in
place meanwhile is noted here first (`note_stamp`, `note_row`), and whoever draws reads first and looks at the
notes afterwards: a change that was seen has been noted. Each read of a dict is one C call, in which no other
Python code runs, so that inserts never disturb it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from idregistry.encoding import SUBS, Hashes, split_keys
from idregistry.holding import Stamps
from idregistry.recent import STAMP_DTYPE, Sub, Subs
from idregistry.segments import Columns, Segment


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
    """The ids of a layout that are alive at the moment it is made."""

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

    # --- the thread that changes the state, before each change

    def note_stamp(self, number: int, sub: Sub, key: bytes, stamp: bytes) -> None:
        """The stamp of `key` in a sub-dict is about to be replaced; it was `stamp`."""
        # Another dict may stand in its place by now: the one the cut holds does not change any more.
        if number >= self._drawn and self._subs[number] is sub:
            self._stamps[number].setdefault(key, stamp)

    def note_row(self, number: int, columns: Columns, row: int) -> None:
        """A row of a segment, of sub-dict `number`, is about to be changed."""
        if number >= self._drawn and (columns, row) not in self._rows[number]:
            self._rows[number][columns, row] = columns.stamp(row)

    def note_rows(self, numbers: bytes, places: list[int], columns: Columns, rows: list[int]) -> None:
        """The same of many: `rows[i]` is of sub-dict `numbers[places[i]]`."""
        for place, row in zip(places, rows, strict=True):
            self.note_row(numbers[place], columns, row)

    # --- the thread that draws

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
        hashes, tails = split_keys(number, keys)
        return Rows(hashes, tails, np.frombuffer(b"".join(stamps), STAMP_DTYPE))

    def _draw_rows(self, number: int, columns: Columns, start: int, stop: int) -> Rows:
        stamps = columns.stamps(start, stop)
        for (changed, row), stamp in self._rows[number].copy().items():
            if changed is columns and start <= row < stop:
                stamps[row - start] = np.frombuffer(stamp, STAMP_DTYPE)[0]
        return Rows(columns.hashes[start:stop], columns.tails[start:stop], stamps)


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
