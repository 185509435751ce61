"""Recent ids become packed rows, and small segments one larger: local work, in small steps. Pure.

Nothing here changes an answer, so each replica does it when it has time. It goes sub-dict by sub-dict: the
rows that were there when the work began, and the rows of the merged segments that belong to it, go to the new
columns in order; a new dict with the rest takes the old one's place. What is dead is left behind.
"""

from itertools import islice
from typing import Final

import numpy as np

from idregistry.cuts import Layout, Rows, in_order
from idregistry.encoding import SUBS, split_keys
from idregistry.holding import Holding
from idregistry.recent import STAMP_DTYPE, Sub
from idregistry.segments import Columns, Segment

FREEZE_IDS: Final = 1 << 20
"""So many recent ids are frozen at once: 0.1 GB of dicts, and few segments."""

FREEZE_IDS_MIN: Final = 1 << 16
FREEZE_AFTER_US: Final = 600_000_000
"""Fewer, but FREEZE_IDS_MIN at least, are frozen when so much of the leaders' time has passed."""

STEP_IDS: Final = 8_192
"""Ids moved in a step, or one sub-dict's where it has more: 3 ms, 10 ms for ten million ids."""

SUB_IDS_MAX: Final = 16_384
"""Ids taken from one sub-dict at a time: who could not tidy for long catches up in steps as short as any."""

DEAD_SHARE: Final = 0.25
"""A segment of which so much is dead is written anew."""

COMPACT_SHARE: Final = 0.25
"""Where so many of a segment's ids had tokens that were cleared since, those left are written anew."""

COMPACT_TOKENS: Final = 1 << 19
"""Tokens looked at in a step: 3 ms."""


class Freezing:
    """Freezes the ids that are in the dicts of `layout`, if `recent`, and merges `inputs` with them.

    Of more than SUB_IDS_MAX in a dict, the first.
    """

    def __init__(self, layout: Layout, inputs: tuple[Segment, ...], recent: bool) -> None:
        self._lengths = [min(len(sub), SUB_IDS_MAX) if recent else 0 for sub in layout.subs]
        self._inputs = inputs
        self._others = tuple(segment for segment in layout.segments if segment not in inputs)
        self._bounds = [segment.bounds() for segment in inputs]
        recent_ids = sum(self._lengths)
        self._columns = Columns(
            recent_ids + sum(segment.ids for segment in inputs),
            recent_ids + sum(segment.columns.holding.held for segment in inputs),
        )
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == SUBS

    def step(self, layout: Layout, first_live: int) -> Layout:
        """Move the next ids, at least STEP_IDS if there are so many; the layout that says so."""
        subs = list(layout.subs)
        moved = 0
        while moved < STEP_IDS and not self.done:
            moved += self._move(subs, first_live)
        made = Segment(self._columns, 0, self._next, 0, self._columns.filled)
        return Layout(tuple(subs), tuple(filter(_has_any, (*self._others, *self._left(), made))))

    def _move(self, subs: list[Sub], first_live: int) -> int:
        """The ids of the next sub-dict; how many there were."""
        number = self._next
        sub, count = subs[number], self._lengths[number]
        parts = [
            _rows_in(segment.columns, bounds[number], bounds[number + 1])
            for segment, bounds in zip(self._inputs, self._bounds, strict=True)
            if bounds[number] < bounds[number + 1]
        ]
        if count:
            parts.append(_rows_of(number, sub, count))
            subs[number] = dict(islice(sub.items(), count, None))
        self._next = number + 1
        moved = sum(map(len, parts))
        if parts:
            rows = in_order(parts, first_live)
            self._columns.append(number, rows.hashes, rows.tails, rows.stamps)
        else:
            self._columns.skip(number)
        return moved

    def _left(self) -> tuple[Segment, ...]:
        """What is not moved yet."""
        return tuple(
            Segment(segment.columns, self._next, SUBS, bounds[self._next], segment.stop)
            for segment, bounds in zip(self._inputs, self._bounds, strict=True)
        )


class Compacting:
    """What is left of a segment's tokens goes to columns of their own: its ids stay where they are."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        # Until it is done, what is cleared is cleared in both.
        self._made = columns.compacted = Holding(columns.holding.held, sparse=True)
        self._next = 0

    def step(self) -> bool:
        """Copy the next tokens; whether there are more."""
        first, self._next = self._next, self._next + COMPACT_TOKENS
        if self._columns.holding.copy(first, self._next, self._made):
            return True
        self._columns.holding, self._columns.compacted = self._made, None
        return False


def _has_any(segment: Segment) -> bool:
    return segment.ids > 0


def _rows_of(number: int, sub: Sub, count: int) -> Rows:
    hashes, tails = split_keys(number, list(islice(sub, count)))
    return Rows(hashes, tails, np.frombuffer(b"".join(islice(sub.values(), count)), STAMP_DTYPE))


def _rows_in(columns: Columns, start: int, stop: int) -> Rows:
    return Rows(columns.hashes[start:stop], columns.tails[start:stop], columns.stamps(start, stop))


def to_merge(segments: tuple[Segment, ...], ids: int) -> tuple[Segment, ...]:
    """The segments to merge with `ids` new ones: while the next is no larger than all before together."""
    chosen: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.ids):
        if segment.ids > ids:
            break
        chosen.append(segment)
        ids += segment.ids
    return tuple(chosen)


def dead_in(segment: Segment, first_live: int) -> int:
    """How many rows are dead. 4 ms for ten million."""
    buckets = segment.columns.buckets[segment.start : segment.stop]
    return int(np.count_nonzero(buckets < first_live))
