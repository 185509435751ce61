"""Timers and holds of one computation in one worker (paper 4.6).

All pending ones are in memory: they are what a worker has to know when it starts, and what holds the low
watermark. A bucket for each distinct time: timers of windows share few.
"""

import heapq
from typing import Any, Final, NamedTuple

from millwheel.computation import Tag

WATERMARK: Final = 0
WALL: Final = 1
HOLD: Final = 2
"""A hold is a timer that never fires."""

Pending = dict[tuple[int, Tag], int]
"""Of one key: (clock, tag) -> time."""


class Firing(NamedTuple):
    """`text`: whether the tag is one; they have an order then."""

    time: int
    key: str
    text: bool
    tag: Any


class Due:
    """`pending`: by key; a key without timers is not in it."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self._buckets: tuple[dict[int, list[tuple[str, Tag]]], ...] = ({}, {}, {})
        self._heaps: tuple[list[int], ...] = ([], [], [])

    def set(self, key: str, clock: int, tag: Tag, time: int) -> None:
        timers = self.pending.get(key)
        if timers is None:
            timers = self.pending[key] = {}
        if timers.get((clock, tag)) == time:
            return
        timers[clock, tag] = time
        self._index(key, clock, tag, time)

    def drop(self, key: str, clock: int, tag: Tag) -> None:
        timers = self.pending.get(key)
        if timers is not None and timers.pop((clock, tag), None) is not None and not timers:
            del self.pending[key]

    def restore(self, key: str, timers: Pending) -> None:
        """Set all of a key's timers."""
        self.pending.pop(key, None)
        if timers:
            self.pending[key] = dict(timers)
            for (clock, tag), time in timers.items():
                self._index(key, clock, tag, time)

    def earliest(self, clock: int) -> int | None:
        heap, buckets = self._heaps[clock], self._buckets[clock]
        while heap:
            bucket = buckets[heap[0]]
            while bucket:
                key, tag = bucket[-1]
                if self._stands(key, clock, tag, heap[0]):
                    return heap[0]
                bucket.pop()
            del buckets[heapq.heappop(heap)]
        return None

    def take(self, clock: int, upto: int, most: int) -> list[Firing]:
        """Those due at or before `upto`, by time, which are gone now; `most` at least, if there are."""
        fired: list[Firing] = []
        heap, buckets = self._heaps[clock], self._buckets[clock]
        while heap and heap[0] <= upto and len(fired) < most:
            time = heapq.heappop(heap)
            fresh = []
            for key, tag in buckets.pop(time):
                if self._stands(key, clock, tag, time):
                    self.drop(key, clock, tag)
                    fresh.append(Firing(time, key, type(tag) is str, tag))
            fired += sorted(fresh)
        return fired

    def which(self, clock: int) -> tuple[int, str, Tag] | None:
        """The earliest, as time, key and tag."""
        time = self.earliest(clock)
        if time is None:
            return None
        return time, *self._buckets[clock][time][-1]

    def _stands(self, key: str, clock: int, tag: Tag, time: int) -> bool:
        timers = self.pending.get(key)
        return timers is not None and timers.get((clock, tag)) == time

    def _index(self, key: str, clock: int, tag: Tag, time: int) -> None:
        bucket = self._buckets[clock].get(time)
        if bucket is None:
            self._buckets[clock][time] = [(key, tag)]
            heapq.heappush(self._heaps[clock], time)
        else:
            bucket.append((key, tag))
