"""Ids by event time: in which bucket one is, how many each bucket has, which are expired (paper 2.3). Pure.

A bucket that lies wholly before the boundary is dead, all ids in it with it: at once, by the boundary alone.
"""

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.encoding import FEW
from idregistry.messages import TIME_BYTES
from photon.core.columns import unpack_times

BUCKET_US: Final = 3_600_000_000
"""Event time a bucket spans. Part of the replicated state: all replicas use the same."""

NO_BOUNDARY: Final = -(1 << 63)
"""Below every event time: nothing is expired yet."""

DEAD: Final = -(1 << 31)
"""The bucket of what is released: before every boundary."""

_FIRST: Final = DEAD + 1
_LAST: Final = (1 << 31) - 1


def bucket_of(time_us: int) -> int:
    """The bucket's number. Times that no calendar knows are clipped to the first and the last."""
    return min(max(time_us // BUCKET_US, _FIRST), _LAST)


def buckets_of(times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """N times -> N bucket numbers."""
    return np.clip(times_us // BUCKET_US, _FIRST, _LAST)


def first_live(boundary_us: int) -> int:
    """The first bucket that is not wholly before the boundary."""
    return max(boundary_us // BUCKET_US, _FIRST)


def span(times: bytes) -> tuple[int, int]:
    """8 x N bytes, N > 0 -> the least and the greatest time."""
    count = len(times) // TIME_BYTES
    if count <= FEW:
        few = struct.unpack(f"<{count}q", times)
        return min(few), max(few)
    times_us = unpack_times(times)
    return int(times_us.min()), int(times_us.max())


class BucketCounts:
    """How many ids each bucket has. `total` is that of all."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, bucket: int, ids: int) -> None:
        """`ids` more in one bucket, fewer if negative."""
        self._counts[bucket] = self._counts.get(bucket, 0) + ids
        self.total += ids

    def add_each(self, buckets: npt.NDArray[np.integer]) -> None:
        """One more in the bucket of each row."""
        numbers, counts = np.unique(buckets, return_counts=True)
        for bucket, ids in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.add(bucket, ids)

    def drop_before(self, live: int) -> None:
        """Forget the buckets before `live`."""
        dead = [bucket for bucket in self._counts if bucket < live]
        for bucket in dead:
            self.total -= self._counts.pop(bucket)
