"""Ids and their stamps, wherever they are: what is physical about a shard's state, none of its rules. Pure.

One thread changes it. `present` and `cut` may be called from any thread: they take the layout once, and what
they took stays whole. Dicts are looked at before segments, as ids only move from the former to the latter.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.cuts import Cut, Layout
from idregistry.encoding import KEY_BYTES, SUBS, Encoded
from idregistry.freezing import (
    DEAD_SHARE,
    FREEZE_AFTER_US,
    FREEZE_IDS,
    FREEZE_IDS_MIN,
    Freezing,
    dead_in,
    to_merge,
)
from idregistry.recent import GONE, STAMP, empty_subs, stamps_of, subs_of
from idregistry.segments import ROW_BYTES, Columns, Segment

Mask = npt.NDArray[np.bool_]

_KEY_OBJECT: Final = sys.getsizeof(bytes(KEY_BYTES))


class IdTable:
    """Key -> stamp, in dicts while ids are new, in segments later."""

    def __init__(self, frozen: Columns | None = None) -> None:
        """`frozen`: ids that are there from the beginning."""
        segments = (Segment(frozen, 0, SUBS, 0, frozen.filled),) if frozen and frozen.filled else ()
        self._layout = Layout(empty_subs(), segments)
        self._cuts: list[weakref.ref[Cut]] = []
        self._freezing: Freezing | None = None
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

    def stamps(self, batch: Encoded) -> npt.NDArray[np.void]:
        """The ids' stamps in the dicts, GONE where there is none."""
        return stamps_of(self._layout.subs, batch)

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

    def put_frozen(self, number: int, segment: Segment, row: int, stamp: bytes) -> None:
        """Give an id that is in a segment another stamp."""
        columns = segment.columns
        for cut in self._live_cuts():
            cut.note_row(number, columns, row)
        columns.holders[row], columns.times_us[row], columns.buckets[row] = STAMP.unpack(stamp)

    def clear_frozen(self, batch: Encoded, live: int) -> Mask:
        """Take the tokens of the ids that are alive in segments; which these are."""
        cleared = np.zeros(batch.count, np.bool_)
        cuts = list(self._live_cuts())
        for segment in self._layout.segments:
            rows = segment.find(batch.hashes, batch.tails)
            alive = segment.live(rows, live)
            cleared |= alive
            if cuts:
                for place in np.flatnonzero(alive).tolist():
                    for cut in cuts:
                        cut.note_row(batch.subs[place], segment.columns, int(rows[place]))
            segment.columns.holders[rows[alive]] = 0
            segment.columns.times_us[rows[alive]] = 0
        return cleared

    def _live_cuts(self) -> Iterator[Cut]:
        for reference in self._cuts:
            cut = reference()
            if cut is not None and not cut.drawn:
                yield cut

    # --- local work: no answer hangs on it

    def tidy(self, time_us: int, live: int) -> bool:
        """One step of freezing recent ids and dropping dead ones; whether more is to be done."""
        if self._freezing is None:
            self._freezing = self._due_freezing(time_us) or self._due_rewriting(live)
        if self._freezing is None:
            return bool(self._to_check)
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

    def memory(self) -> dict[str, int]:
        """Bytes and ids, as reckoned (the dead among them). Any thread."""
        layout = self._layout
        recent = sum(map(len, layout.subs))
        rows = sum(segment.ids for segment in layout.segments)
        cells = sum(segment.columns.cells.nbytes for segment in layout.segments)
        return {
            "recent_ids": recent,
            "recent_bytes": sum(map(sys.getsizeof, layout.subs)) + recent * _KEY_OBJECT,
            "frozen_ids": rows,
            "frozen_bytes": rows * ROW_BYTES + cells,
            "segments": len(layout.segments),
        }
