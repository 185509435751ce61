"""Ids and their stamps, wherever they are: what is physical about a shard's state, none of its rules. Pure.

One thread changes it. `present` and `cut` may be called from any thread: they take the layout once, and what
they took stays whole. Dicts are looked at before segments, as ids only move from the former to the latter.
"""

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.cuts import Cut, Layout
from idregistry.encoding import KEY_BYTES, SUBS, Encoded
from idregistry.freezing import (
    COMPACT_SHARE,
    DEAD_SHARE,
    FREEZE_AFTER_US,
    FREEZE_IDS,
    FREEZE_IDS_MIN,
    Compacting,
    Freezing,
    dead_in,
    to_merge,
)
from idregistry.holders import NOBODY
from idregistry.recent import GONE, STAMP, empty_subs, split_stamps, stamps_in, stamps_of, subs_of
from idregistry.segments import ROW_BYTES, Columns, Segment

Mask = npt.NDArray[np.bool_]

_KEY_OBJECT: Final = sys.getsizeof(bytes(KEY_BYTES))
_BLANKS_MAX: Final = 4096
_CLEAR_STEP: Final = 1024
"""Ids read, then written: what was read of the dicts is in the processor's cache still. Half the time."""


class IdTable:
    """Key -> stamp, in dicts while ids are new, in segments later."""

    def __init__(self, frozen: Columns | None = None) -> None:
        """`frozen`: ids that are there from the beginning."""
        segments = (Segment(frozen, 0, SUBS, 0, frozen.filled),) if frozen and frozen.filled else ()
        self._layout = Layout(empty_subs(), segments)
        self._cuts: list[weakref.ref[Cut]] = []
        self._freezing: Freezing | None = None
        self._compacting: Compacting | None = None
        self._blanks: dict[int, bytes] = {}
        """Bucket -> the stamp of all that is cleared in it."""
        self._frozen_us: int | None = None
        self._to_check: list[Segment] = []
        self._checked_live: int | None = None

    # --- any thread

    def present(self, batch: Encoded, live: int) -> Mask:
        """Which ids have a stamp that is alive."""
        layout = self._layout
        present: Mask = stamps_of(layout.subs, batch)["bucket"] >= live
        for segment in layout.segments:
            present |= segment.live(segment.find(batch.hashes, batch.tails), live)
        return present

    def cut(self, live: int) -> Cut:
        """Of what is alive now. Changes in place that come while it is drawn may show in it."""
        return Cut(self._layout, live)

    # --- the thread that changes it

    def exact_cut(self, live: int) -> Cut:
        """Of what is alive now, whatever changes while it is drawn."""
        cut = self.cut(live)
        self._cuts = [known for known in self._cuts if known() is not None]
        self._cuts.append(weakref.ref(cut))
        return cut

    def any_frozen(self, batch: Encoded, live: int) -> bool:
        """Whether one of the ids is alive in a segment."""
        return any(
            segment.live(segment.find(batch.hashes, batch.tails), live).any()
            for segment in self._layout.segments
        )

    def frozen(self, batch: Encoded, live: int) -> dict[int, tuple[Segment, int]]:
        """Where in segments the ids are that are alive there: place in the batch -> segment and row."""
        found = {}
        for segment in self._layout.segments:
            rows = segment.find(batch.hashes, batch.tails)
            for place in np.flatnonzero(segment.live(rows, live)).tolist():
                found[place] = segment, int(rows[place])
        return found

    def frozen_stamps(self, batch: Encoded, live: int) -> dict[int, bytes]:
        """The stamps of the ids that are alive in segments, by their places in the batch."""
        found: dict[int, bytes] = {}
        for segment in self._layout.segments:
            rows = segment.find(batch.hashes, batch.tails)
            places = np.flatnonzero(segment.live(rows, live))
            if len(places):
                packed = segment.columns.stamps_of(rows[places]).tobytes()
                found |= zip(places.tolist(), split_stamps(packed), strict=True)
        return found

    def stamp(self, number: int, key: bytes) -> bytes:
        """An id's stamp in its dict, GONE where there is none."""
        return self._layout.subs[number].get(key, GONE)

    def insert(self, batch: Encoded, stamps: list[bytes]) -> list[bytes]:
        """Give each id without any its stamp; the stamps the ids have now. One C-level pass."""
        return list(map(dict.setdefault, subs_of(self._layout.subs, batch), batch.keys, stamps))

    def put(self, number: int, key: bytes, stamp: bytes) -> None:
        """Give an id a stamp in its dict, whatever it had."""
        sub = self._layout.subs[number]
        old = sub.get(key)
        if old is not None:
            for cut in self._live_cuts():
                cut.note_stamp(number, sub, key, old)
        sub[key] = stamp

    def release_frozen(self, number: int, segment: Segment, row: int) -> None:
        """Take out an id that is in a segment."""
        for cut in self._live_cuts():
            cut.note_row(number, segment.columns, row)
        segment.columns.release(row)

    def clear(self, batch: Encoded, live: int) -> Mask:
        """Take the tokens of the ids that are alive; which these are. C-level passes."""
        cleared = self._clear_recent(batch, live)
        if not cleared.all():
            self._clear_frozen(batch, live, cleared)
        return cleared

    def _clear_recent(self, batch: Encoded, live: int) -> Mask:
        """Of the ids that are alive in the dicts; which these are."""
        alive = np.empty(batch.count, np.bool_)
        noted = any(self._live_cuts())
        for start in range(0, batch.count, _CLEAR_STEP):
            part = slice(start, start + _CLEAR_STEP)
            subs = list(map(self._layout.subs.__getitem__, batch.subs[part]))
            keys = batch.keys[part]
            stamps = stamps_in(subs, keys)
            alive[part] = stamps["bucket"] >= live
            held = alive[part] & (stamps["holder"] != NOBODY)
            if held.any():
                flags = held.tolist()
                keys_held, blanks = compress(keys, flags), self._blanks_of(stamps["bucket"][held])
                if noted:
                    deque(map(self.put, compress(batch.subs[part], flags), keys_held, blanks), 0)
                else:
                    deque(map(dict.__setitem__, compress(subs, flags), keys_held, blanks), 0)
        return alive

    def _blanks_of(self, buckets: npt.NDArray[np.int32]) -> Iterable[bytes]:
        """The stamp of each id that is cleared."""
        first = buckets[0]
        if (buckets == first).all():
            return repeat(self._blank(int(first)), len(buckets))
        numbers, rows = np.unique(buckets, return_inverse=True)
        return map(list(map(self._blank, numbers.tolist())).__getitem__, rows.tolist())

    def _blank(self, bucket: int) -> bytes:
        blank = self._blanks.get(bucket)
        if blank is None:
            if len(self._blanks) >= _BLANKS_MAX:
                self._blanks.clear()
            blank = self._blanks[bucket] = STAMP.pack(NOBODY, 0, bucket)
        return blank

    def _clear_frozen(self, batch: Encoded, live: int, cleared: Mask) -> None:
        """Those that are not cleared yet: they become so where they are in segments."""
        left = np.flatnonzero(~cleared)
        cuts = list(self._live_cuts())
        for segment in sorted(self._layout.segments, key=lambda segment: -segment.ids):
            rows = segment.find(batch.hashes[left], batch.tails[left])
            alive = segment.live(rows, live)
            places, found = left[alive], rows[alive]
            for cut in cuts:
                cut.note_rows(batch.subs, places.tolist(), segment.columns, found.tolist())
            segment.columns.clear(found)
            cleared[places] = True
            left = left[~alive]

    def _live_cuts(self) -> Iterator[Cut]:
        for reference in self._cuts:
            cut = reference()
            if cut is not None and not cut.drawn:
                yield cut

    # --- local work: no answer hangs on it

    def tidy(self, time_us: int, live: int) -> bool:
        """One step of freezing recent ids and dropping dead ones and tokens; whether more is to be done."""
        if self._compacting is not None:
            if not self._compacting.step():
                self._compacting = None
            return True
        if self._freezing is None:
            self._freezing = self._due_freezing(time_us) or self._due_rewriting(live)
        if self._freezing is None:
            self._compacting = self._due_compacting()
            return self._compacting is not None or bool(self._to_check)
        self._layout = self._freezing.step(self._layout, live)
        if self._freezing.done:
            self._freezing, self._frozen_us = None, time_us
            self._checked_live = None
        return True

    def _due_freezing(self, time_us: int) -> Freezing | None:
        layout = self._layout
        recent = sum(map(len, layout.subs))
        if self._frozen_us is None or not recent:
            self._frozen_us = time_us
        waited = time_us - self._frozen_us >= FREEZE_AFTER_US
        if recent < FREEZE_IDS and not (waited and recent >= FREEZE_IDS_MIN):
            return None
        return Freezing(layout, to_merge(layout.segments, recent), recent=True)

    def _due_rewriting(self, live: int) -> Freezing | None:
        """Look at one segment; whether it is worth while to write it anew without what is dead."""
        if self._checked_live != live:
            self._checked_live = live
            self._to_check = list(self._layout.segments)
        if not self._to_check:
            return None
        segment = self._to_check.pop()
        dead = dead_in(segment, live)
        if dead == segment.ids:
            left = tuple(other for other in self._layout.segments if other is not segment)
            self._layout = Layout(self._layout.subs, left)
            return None
        if dead < segment.ids * DEAD_SHARE:
            return None
        return Freezing(self._layout, (segment,), recent=False)

    def _due_compacting(self) -> Compacting | None:
        for segment in self._layout.segments:
            if 0 < segment.ids * COMPACT_SHARE <= segment.columns.holding.cleared:
                return Compacting(segment.columns)
        return None

    def memory(self) -> dict[str, int]:
        """Bytes and ids, as reckoned (the dead among them). Any thread."""
        layout = self._layout
        recent = sum(map(len, layout.subs))
        rows = sum(segment.ids for segment in layout.segments)
        cells = sum(segment.columns.cells.nbytes for segment in layout.segments)
        tokens = sum(segment.columns.holding.nbytes for segment in layout.segments)
        return {
            "recent_ids": recent,
            "recent_bytes": sum(map(sys.getsizeof, layout.subs)) + recent * _KEY_OBJECT,
            "frozen_ids": rows,
            "frozen_bytes": rows * ROW_BYTES + cells + tokens,
            "segments": len(layout.segments),
        }
