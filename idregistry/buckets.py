"""The ids of a shard by event time, for garbage collection (paper 2.3) and for snapshots. Pure.

A bucket holds the ids of one span of event time as packed columns which only grow at their end. That is what
makes a consistent cut cheap: it names how much of each column it takes, copies nothing, and stays true while
ids are added and collected.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import take_ids
from photon.core.ids import ID_BYTES

BUCKET_US: Final = 3_600_000_000
"""Event time a bucket spans. Part of the replicated state: all replicas use the same."""


class Bucket:
    """Ids (packed) and their tokens, in the order in which they won; the first `start` are collected."""

    __slots__ = ("ids", "start", "tokens")

    def __init__(self) -> None:
        self.ids = bytearray()
        self.tokens: list[bytes] = []
        self.start = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `start` to `end` of a bucket, as they were at one moment."""

    number: int
    bucket: Bucket
    start: int
    end: int

    def parts(self, ids_max: int) -> Iterator[tuple[int, bytes, list[bytes]]]:
        """(bucket number, ids, tokens) in pieces. A slice is one step under the GIL: the bucket may grow."""
        for start in range(self.start, self.end, ids_max):
            end = min(start + ids_max, self.end)
            ids = bytes(self.bucket.ids[start * ID_BYTES : end * ID_BYTES])
            yield self.number, ids, self.bucket.tokens[start:end]


class Buckets:
    """All buckets of a shard, and which is the oldest."""

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}
        self._oldest: list[int] = []

    def add(self, ids: bytes, times_us: npt.NDArray[np.int64], tokens: list[bytes]) -> None:
        """N won ids (16 x N bytes) with their times and tokens."""
        numbers = times_us // BUCKET_US
        if len(numbers) == 0:
            return
        if numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
            self.append(int(numbers[0]), ids, tokens)
            return
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        ids = take_ids(ids, order)
        tokens = list(map(tokens.__getitem__, order.tolist()))
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(tokens)]
        for start, end in zip(cuts, islice(cuts, 1, None), strict=False):
            self.append(int(numbers[start]), ids[start * ID_BYTES : end * ID_BYTES], tokens[start:end])

    def append(self, number: int, ids: bytes, tokens: Iterable[bytes]) -> None:
        """Ids that all belong to bucket `number`."""
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket()
            heapq.heappush(self._oldest, number)
        bucket.ids += ids
        bucket.tokens += tokens

    def collectable(self, boundary_us: int) -> bool:
        """Whether a bucket lies wholly before the boundary."""
        return bool(self._oldest) and (self._oldest[0] + 1) * BUCKET_US <= boundary_us

    def collect(self, boundary_us: int, ids_max: int) -> bytes:
        """Take out up to `ids_max` ids of buckets wholly before the boundary, the oldest first."""
        taken = bytearray()
        while self.collectable(boundary_us) and len(taken) < ids_max * ID_BYTES:
            number = self._oldest[0]
            bucket = self._buckets[number]
            room = ids_max - len(taken) // ID_BYTES
            end = min(bucket.start + room, len(bucket.tokens))
            taken += bucket.ids[bucket.start * ID_BYTES : end * ID_BYTES]
            bucket.start = end
            if end == len(bucket.tokens):
                del self._buckets[number]
                heapq.heappop(self._oldest)
        return bytes(taken)

    def cut(self) -> list[Cut]:
        """A consistent cut of all that is not collected; O(number of buckets)."""
        return [Cut(n, b, b.start, len(b.tokens)) for n, b in self._buckets.items()]
