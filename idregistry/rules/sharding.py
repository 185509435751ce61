"""The sharding configuration: which number of shards holds from which event time on (paper 2.2.2). Pure.

start_us | shards        An event of time t belongs to the last interval that starts at or before t, and in
-inf     | 2             it to shard hash(id) modulo the interval's number. A new interval is only ever
t2       | 6             appended, from a time at which no id is registered yet: no mapping changes.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import Encoded
from photon.core.columns import hash_ids, unpack_times

BEGINNING: Final = -(1 << 63)
"""Start of the first interval, us."""

HORIZON: Final = 7_258_118_400_000_000
"""2200-01-01 in us. No clock says such a time: events from there on belong to the first interval, so that a
time that can't be never stands in the way of a new one."""

SHARDS_MAX: Final = 4096
INTERVALS_MAX: Final = 1024


class Interval(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Events from `start_us` on, until the next interval's start, are spread over `shards` shards."""

    start_us: int
    shards: int


class Configuration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The whole table. `version` grows with each change. ValueError for a table that can't be."""

    version: int
    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        if not self.intervals or self.intervals[0].start_us != BEGINNING:
            raise ValueError("the first interval must start at the beginning of time")
        if len(self.intervals) > INTERVALS_MAX:
            raise ValueError(f"{len(self.intervals)} intervals, at most {INTERVALS_MAX}")
        if any(one.start_us >= other.start_us for one, other in pairwise(self.intervals)):
            raise ValueError("intervals must be in order of their starts")
        if not all(1 <= interval.shards <= SHARDS_MAX for interval in self.intervals):
            raise ValueError(f"an interval has 1 to {SHARDS_MAX} shards")

    @property
    def shards(self) -> int:
        """How many shards there must be: numbers 0 to one below it."""
        return max(interval.shards for interval in self.intervals)

    def shard_of(self, ids: bytes, times: bytes) -> npt.NDArray[np.uint64]:
        """16 x N, 8 x N bytes -> N shard numbers."""
        hashes = hash_ids(ids)
        if len(self.intervals) == 1:
            return hashes % np.uint64(self.intervals[0].shards)
        starts = np.array([interval.start_us for interval in self.intervals], np.int64)
        numbers = np.array([interval.shards for interval in self.intervals], np.uint64)
        at = unpack_times(times)
        rows = np.searchsorted(starts, at, "right") - 1
        rows[at >= HORIZON] = 0
        shard: npt.NDArray[np.uint64] = hashes % numbers[rows]
        return shard

    def pack(self) -> bytes:
        """As it goes to clients."""
        return msgspec.msgpack.encode(self)


def unpack_configuration(data: bytes) -> Configuration:
    """The reverse of `Configuration.pack`. ValueError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=Configuration)
    except msgspec.DecodeError as error:
        raise ValueError(f"no sharding configuration: {error}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that may come: until then no id from `start_us` on is registered. `fits`: none was."""

    version: int
    start_us: int
    fits: bool


class Ownership:
    """Which ids shard `shard` may decide on, by the configuration in its log. Without one, none."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._starts: list[int] = []
        self.configuration: Configuration | None = None
        self.prepared: Prepared | None = None

    def prepare(self, version: int, start_us: int, fits: bool) -> None:
        """Take no ids from `start_us` on until a configuration of this version or a newer one is here.

        Ignored but for the version that follows the configuration here: one before it, still to come, would
        open again what is closed.
        """
        known = 0 if self.configuration is None else self.configuration.version
        if version == known + 1 and self.prepared is None:
            self.prepared = Prepared(version, start_us, fits)

    def configure(self, configuration: Configuration) -> None:
        """Take a newer configuration."""
        if self.configuration is not None and configuration.version <= self.configuration.version:
            return
        self.configuration = configuration
        self._starts = [interval.start_us for interval in configuration.intervals]
        if self.prepared is not None and configuration.version >= self.prepared.version:
            self.prepared = None

    def owns_all(self, batch: Encoded, low_us: int, high_us: int) -> bool:
        """Whether all of a batch, with times of `low_us` to `high_us`, are owned; False if hard to say."""
        if self.configuration is None or high_us >= HORIZON:
            return False
        if self.prepared is not None and high_us >= self.prepared.start_us:
            return False
        at = bisect_right(self._starts, low_us) - 1
        if at != bisect_right(self._starts, high_us) - 1:
            return False
        shards = self.configuration.intervals[at].shards
        if shards == 1:
            return self._shard == 0
        return bool((batch.hashes % np.uint64(shards) == self._shard).all())

    def owned(self, ids: bytes, times: bytes) -> npt.NDArray[np.bool_]:
        """16 x N, 8 x N bytes -> N flags."""
        times_us = unpack_times(times)
        if self.configuration is None:
            return np.zeros(len(times_us), np.bool_)
        owned: npt.NDArray[np.bool_] = self.configuration.shard_of(ids, times) == self._shard
        if self.prepared is not None:
            owned &= (times_us < self.prepared.start_us) | (times_us >= HORIZON)
        return owned
