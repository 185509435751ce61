"""The sharding configuration: which shards hold from which event time on (paper 2.2.2). Pure.

start_us | shards        An event of time t belongs to the last interval that starts at or before t, and there
-inf     | 0 1           to the shard at hash(id) modulo their count in the interval's list. A new interval is
t2       | 2 3 4 5       only ever appended, from a time at which no id is registered yet: no mapping changes.

Copies of one event that an opaque id names may carry different times, at most the *spread* apart. So for as
long after an interval's start, an opaque id is held in the shards of the earlier intervals too, which *guard*
it: any two copies meet in the shard of the earlier one. Where an id is held in several shards they are asked
in the order of their numbers, and who loses in one gives the others back: so one of the copies always wins.

A *set* is a few replicas, in as many datacenters, which host the same shards ("separate servers"). The
directory is of MAIN_SET; all others follow it as learners. A resharding spreads its shards evenly over all
sets, so load comes to a new set with the event time from which the shards hold, and nothing is copied. A set
that is to go has no part in the next resharding, and is empty when the registry has forgotten what it held.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import Encoded
from photon.core.columns import hash_ids, unpack_times
from photon.core.ids import opaque_mask

BEGINNING: Final = -(1 << 63)
"""Start of the first interval, us."""

HORIZON: Final = 7_258_118_400_000_000
"""2200-01-01 in us. No clock says such a time: events from there on belong to the first interval, so that a
time that can't be never stands in the way of a new one."""

SHARDS_MAX: Final = 4096
LISTED_MAX: Final = 65_536
"""Shards that all intervals list together: a configuration is a command."""
INTERVALS_MAX: Final = 1024
SPREAD_US_MAX: Final = 30 * 86_400_000_000

NOWHERE: Final = 1 << 32
"""No place."""


class Interval(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Events from `start_us` on, until the next interval's start, are spread over these shards."""

    start_us: int
    shards: tuple[int, ...]


class Configuration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The whole table. `version` grows with each change; `spread_us` never does. ValueError for a table that
    can't be.
    """

    version: int
    intervals: tuple[Interval, ...]
    spread_us: int = 0

    def __post_init__(self) -> None:
        if not self.intervals or self.intervals[0].start_us != BEGINNING:
            raise ValueError("the first interval must start at the beginning of time")
        if len(self.intervals) > INTERVALS_MAX:
            raise ValueError(f"{len(self.intervals)} intervals, at most {INTERVALS_MAX}")
        if any(one.start_us >= other.start_us for one, other in pairwise(self.intervals)):
            raise ValueError("intervals must be in order of their starts")
        for shards in (interval.shards for interval in self.intervals):
            if not shards or len({*shards}) < len(shards) or not 0 <= min(shards) <= max(shards) < SHARDS_MAX:
                raise ValueError(f"an interval has 1 to {SHARDS_MAX} shards, each once")
        if self.listed > LISTED_MAX:
            raise ValueError(f"{self.listed} shards in all intervals, at most {LISTED_MAX}")
        if not 0 <= self.spread_us <= SPREAD_US_MAX:
            raise ValueError(f"a spread of {self.spread_us} us; it has 0 to {SPREAD_US_MAX}")

    @property
    def shards(self) -> tuple[int, ...]:
        """Those that there must be, in order."""
        return tuple(sorted({shard for interval in self.intervals for shard in interval.shards}))

    @property
    def listed(self) -> int:
        """Shards in all intervals, one that several list as often."""
        return sum(len(interval.shards) for interval in self.intervals)

    def shard_of(self, ids: bytes, times: bytes) -> npt.NDArray[np.uint64]:
        """16 x N, 8 x N bytes -> N shard numbers."""
        hashes = hash_ids(ids)
        if len(self.intervals) == 1:
            return _among(self.intervals[0], hashes)
        starts = np.array([interval.start_us for interval in self.intervals], np.int64)
        counts = np.array([len(interval.shards) for interval in self.intervals], np.uint64)
        listed = np.array([shard for interval in self.intervals for shard in interval.shards], np.uint64)
        at = unpack_times(times)
        rows = np.searchsorted(starts, at, "right") - 1
        rows[at >= HORIZON] = 0
        shard: npt.NDArray[np.uint64] = listed[(np.cumsum(counts) - counts)[rows] + hashes % counts[rows]]
        return shard

    @property
    def newest_us(self) -> int:
        """Start of the last interval."""
        return self.intervals[-1].start_us

    def needed_from(self, boundary_us: int) -> int:
        """From which event time on anything is asked for where events before the boundary are expired."""
        return boundary_us - self.spread_us

    def places(self, ids: bytes, times: bytes) -> npt.NDArray[np.int64]:
        """16 x N, 8 x N bytes -> N x K places where an id is to be held: shard * 2, + 1 where it guards. Each
        row rises, and ends with NOWHERE where it has fewer than K.
        """
        own = self.shard_of(ids, times).astype(np.int64)
        columns = [own * 2]
        if len(self.intervals) == 1:
            return columns[0][:, None]
        at = unpack_times(times)
        low, high = (int(at.min()), int(at.max())) if len(at) else (0, 0)
        for interval, following in pairwise(self.intervals):
            start_us = following.start_us
            if low < start_us + self.spread_us and high >= start_us:
                near = (at >= start_us) & (at < min(start_us + self.spread_us, HORIZON)) & opaque_mask(ids)
                guard = _among(interval, hash_ids(ids)).astype(np.int64)
                columns.append(np.where(near & (guard != own), guard * 2 + 1, NOWHERE))
        if len(columns) == 1:
            return columns[0][:, None]
        places = np.sort(np.stack(columns, 1), 1)
        places[:, 1:][places[:, 1:] == places[:, :-1]] = NOWHERE  # two earlier intervals, one shard
        places = np.sort(places, 1)
        used: npt.NDArray[np.int64] = places[:, : int((places != NOWHERE).sum(1).max(initial=1))]
        return used


def _among(interval: Interval, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    shards = np.array(interval.shards, np.uint64)
    found: npt.NDArray[np.uint64] = shards[hashes % np.uint64(len(shards))]
    return found


def spread(shards: int, sets: Iterable[str], homes: Mapping[int, str]) -> dict[int, str]:
    """So many shards -> their sets. `homes`: of the shards that there are; those of a set are taken first.

    A set gets one more than another only where the number does not divide, the one that has fewest shards.
    """
    held = Counter(homes.values())
    taken = Counter(dict.fromkeys(sets, 0))
    unused = (number for number in count() if number not in homes)
    there = {name: iter(sorted(shard for shard, home in homes.items() if home == name)) for name in taken}
    found: dict[int, str] = {}
    for _ in range(shards):
        name = min(taken, key=lambda one: (taken[one], held[one], one))
        taken[name] += 1
        shard = next(there[name], None)
        found[next(unused) if shard is None else shard] = name
    return dict(sorted(found.items()))


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a sender came to ask a shard: by the intervals up to that of `known_us`, and whether as a guard."""

    known_us: int
    guard: bool


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
        self.spread_us = 0
        self.configuration: Configuration | None = None
        self.prepared: Prepared | None = None
        self.former: tuple[int, ...] = ()
        """Starts of intervals whose forerunners are gone, and with them who guarded what came soon after."""

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
        starts = [interval.start_us for interval in configuration.intervals]
        self.former = tuple(sorted({*self.former, *self._starts} - {*starts, BEGINNING}))
        self.configuration = configuration
        self.spread_us = configuration.spread_us
        self._starts = starts
        if self.prepared is not None and configuration.version >= self.prepared.version:
            self.prepared = None

    def forget_before(self, live_us: int) -> None:
        """Nothing of events before that is there any more."""
        self.former = tuple(start for start in self.former if start + self.spread_us > live_us)

    def unguarded(self, ids: bytes, times: bytes) -> npt.NDArray[np.bool_]:
        """N flags: who registered it here had to register it with a guard, too, that is gone. Whether it did
        nobody knows any more."""
        at = unpack_times(times)
        near = np.zeros(len(at), np.bool_)
        for start in self.former:
            near |= (at >= start) & (at < start + self.spread_us)
        return near & opaque_mask(ids)

    def owns_all(self, batch: Encoded, low_us: int, high_us: int, known_us: int) -> bool:
        """Whether all of a batch, with times of `low_us` to `high_us`, are owned by who is asked as if by
        intervals up to that of `known_us`; False if hard to say.
        """
        if self.configuration is None or high_us >= HORIZON:
            return False
        if self.prepared is not None and high_us >= self.prepared.start_us:
            return False
        at = bisect_right(self._starts, low_us) - 1
        if at != bisect_right(self._starts, high_us) - 1 or self._starts[at] > known_us:
            return False
        shards = self.configuration.intervals[at].shards
        if self._shard not in shards:
            return False
        place = shards.index(self._shard)
        return len(shards) == 1 or bool((batch.hashes % np.uint64(len(shards)) == place).all())

    def owned(
        self, ids: bytes, times: bytes, counts: Sequence[int], routes: Sequence[Route]
    ) -> npt.NDArray[np.bool_]:
        """16 x N, 8 x N bytes, and how each segment of `counts[i]` ids was routed -> N flags: is it for this
        shard to decide, as its own or as a guard, whichever is asked.

        An event of an interval that its sender did not know is not: its guards were not known either.
        """
        times_us = unpack_times(times)
        if self.configuration is None:
            return np.zeros(len(times_us), np.bool_)
        guards = np.repeat(np.array([route.guard for route in routes], np.int64), counts)
        places = self.configuration.places(ids, times)
        owned: npt.NDArray[np.bool_] = (places == (self._shard * 2 + guards)[:, None]).any(1)
        if self.configuration.newest_us > BEGINNING:
            starts = np.array(self._starts, np.int64)
            rows = np.searchsorted(starts, times_us, "right") - 1
            known = np.repeat(np.array([route.known_us for route in routes], np.int64), counts)
            owned &= (starts[rows] <= known) | (times_us >= HORIZON)
        if self.prepared is not None:
            owned &= (times_us < self.prepared.start_us) | (times_us >= HORIZON)
        return owned
