"""Timers and holds of one computation in one worker (paper 4.6).

All pending ones are in memory: they are what a worker has to know when it starts, and what holds the low
watermark. A bucket for each distinct time: timers of windows share few.
"""

import heapq
from typing import Any, Final, NamedTuple

from millwheel.computation import NEVER, Tag

WATERMARK: Final = 0
WALL: Final = 1
HOLD: Final = 2
"""A hold is a timer that never fires."""

Pending = dict[tuple[int, Tag], int]
"""Of one key: (clock, tag) -> time."""


_Entry = str | tuple[str, Tag]
"""In the bucket of a time: a key that had no other timer, or a key and a tag."""


class Firing(NamedTuple):
    """`text`: whether the tag is one; they have an order then."""

    time: int
    key: str
    text: bool
    tag: Any


class Due:
    """Compact where a key has one timer, at a time of its own: ten million of them fit into memory."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, Tag, int] | Pending] = {}
        """A key without timers is not in it."""
        self._buckets: tuple[dict[int, _Entry | list[_Entry]], ...] = ({}, {}, {})
        self._heaps: tuple[list[int], ...] = ([], [], [])

    def __len__(self) -> int:
        """How many keys have timers."""
        return len(self._pending)

    def of(self, key: str) -> Pending:
        """A key's timers, as a dict of the caller's."""
        found = self._pending.get(key)
        if found is None:
            return {}
        return {found[:2]: found[2]} if isinstance(found, tuple) else dict(found)

    def next_of(self, key: str) -> int:
        """When the key's next timer fires; NEVER if it has none."""
        found = self._pending.get(key)
        if isinstance(found, tuple):
            return NEVER if found[0] == HOLD else found[2]
        return min((time for (clock, _), time in (found or {}).items() if clock != HOLD), default=NEVER)

    def time_of(self, key: str, clock: int, tag: Tag) -> int | None:
        found = self._pending.get(key)
        if isinstance(found, tuple):
            return found[2] if found[0] == clock and found[1] == tag else None
        return None if found is None else found.get((clock, tag))

    def set(self, key: str, clock: int, tag: Tag, time: int) -> None:
        found = self._pending.get(key)
        entry: _Entry = key
        if isinstance(found, dict):
            if found.get((clock, tag)) == time:
                return
            found[clock, tag] = time
            entry = key, tag
        elif found is None or (found[0] == clock and found[1] == tag):
            if found is not None and found[2] == time:
                return
            self._pending[key] = clock, tag, time
        else:
            self._pending[key] = {found[:2]: found[2], (clock, tag): time}
            entry = key, tag
        self._index(entry, clock, time)

    def drop(self, key: str, clock: int, tag: Tag) -> None:
        found = self._pending.get(key)
        if isinstance(found, dict):
            found.pop((clock, tag), None)
            if len(found) == 1:
                ((last, time),) = found.items()
                self._pending[key] = *last, time
        elif found is not None and found[0] == clock and found[1] == tag:
            del self._pending[key]

    def restore(self, key: str, timers: Pending) -> None:
        """Set all of a key's timers."""
        self._pending.pop(key, None)
        for (clock, tag), time in timers.items():
            self.set(key, clock, tag, time)

    def earliest(self, clock: int) -> int | None:
        heap, buckets = self._heaps[clock], self._buckets[clock]
        while heap:
            bucket = buckets[heap[0]]
            if not isinstance(bucket, list):
                if self._standing(bucket, clock, heap[0]):
                    return heap[0]
            else:
                while bucket:
                    if self._standing(bucket[-1], clock, heap[0]):
                        return heap[0]
                    bucket.pop()
            del buckets[heapq.heappop(heap)]
        return None

    def take(self, clock: int, upto: int, most: int) -> list[Firing]:
        """Those due at or before `upto`, by time, which are gone now; about `most`, if there are."""
        fired: list[Firing] = []
        heap, buckets = self._heaps[clock], self._buckets[clock]
        while heap and heap[0] <= upto and len(fired) < most:
            time = heap[0]
            bucket = buckets[time]
            entries = bucket if isinstance(bucket, list) else [bucket]
            part = entries[len(fired) - most :]
            del entries[len(fired) - most :]
            if not entries:
                del buckets[heapq.heappop(heap)]
            fresh = []
            for entry in part:
                key = entry if isinstance(entry, str) else entry[0]
                for tag in self._standing(entry, clock, time):
                    self.drop(key, clock, tag)
                    fresh.append(Firing(time, key, type(tag) is str, tag))
            fired += sorted(fresh)
        return fired

    def which(self, clock: int) -> tuple[int, str, Tag] | None:
        """The earliest, as time, key and tag."""
        time = self.earliest(clock)
        if time is None:
            return None
        bucket = self._buckets[clock][time]
        entry = bucket[-1] if isinstance(bucket, list) else bucket
        key = entry if isinstance(entry, str) else entry[0]
        return time, key, self._standing(entry, clock, time)[0]

    def _standing(self, entry: "_Entry", clock: int, time: int) -> list[Tag]:
        """The tags of the timers that an entry stands for and that still are."""
        if not isinstance(entry, str):
            return [entry[1]] if self.time_of(entry[0], clock, entry[1]) == time else []
        found = self._pending.get(entry)
        if isinstance(found, tuple):
            return [found[1]] if found[0] == clock and found[2] == time else []
        return [tag for (its, tag), at in found.items() if its == clock and at == time] if found else []

    def _index(self, entry: "_Entry", clock: int, time: int) -> None:
        buckets = self._buckets[clock]
        bucket = buckets.get(time)
        if bucket is None:
            buckets[time] = entry
            heapq.heappush(self._heaps[clock], time)
        elif isinstance(bucket, list):
            bucket.append(entry)
        else:
            buckets[time] = [bucket, entry]
