"""Accounts of events: by key, how many there are and the sum of their hashes.

Two sides that should hold the same events compare accounts. A count alone would hide an event that is missing
behind one that is there twice; the sum does not. Both sides change all the time, so an account can leave out
what its holders' tokens date from some moment on: tokens of the last minutes are kept apart, by windows.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from photon.core.columns import hash_ids, unpack_times

WINDOW_US: Final = 10_000_000
"""Of token time."""
WINDOWS: Final = 30
"""So many windows before the present one are kept apart."""
HOUR_US: Final = 3_600_000_000
HOURS_A_DAY: Final = 24
_HOUR_MAX: Final = (1 << 31) - 1
"""Times that no calendar knows are clipped, as the registry clips them."""
_MASK: Final = (1 << 64) - 1

Sum = tuple[int, int]
"""Events, and the sum of their hashes (columns.hash_ids) modulo 2^64."""
NOTHING: Final[Sum] = (0, 0)
Key = TypeVar("Key", bound=Hashable)


def plus(one: Sum, other: Sum) -> Sum:
    """Both together."""
    return one[0] + other[0], (one[1] + other[1]) & _MASK


def minus(one: Sum, other: Sum) -> Sum:
    """The one without the other."""
    return one[0] - other[0], (one[1] - other[1]) & _MASK


def window_of(time_us: int) -> int:
    """The number of a token's window."""
    return time_us // WINDOW_US


def sums_by_day(ids: bytes, times: bytes) -> dict[int, Sum]:
    """16 x N, 8 x N bytes, N > 0 -> the account of the events of each day of event time, since 1970."""
    hashes, times_us = hash_ids(ids), unpack_times(times)
    first, last = _day_of(int(times_us.min())), _day_of(int(times_us.max()))
    if first == last:  # of most batches
        return {first: (len(hashes), int(hashes.sum()))}
    hours = np.clip(times_us // HOUR_US, -_HOUR_MAX, _HOUR_MAX)
    days, day_of = np.unique(hours // HOURS_A_DAY, return_inverse=True)
    return dict(zip(days.tolist(), grouped(day_of, hashes, len(days)), strict=True))


def _day_of(time_us: int) -> int:
    return min(max(time_us // HOUR_US, -_HOUR_MAX), _HOUR_MAX) // HOURS_A_DAY


def grouped(group_of: npt.NDArray[np.intp], hashes: npt.NDArray[np.uint64], groups: int) -> list[Sum]:
    """The account of each group. By halves of the hashes: floats hold the sums of 2^20 halves exactly."""
    low = np.bincount(group_of, (hashes & np.uint64(0xFFFF_FFFF)).astype(np.float64), groups)
    high = np.bincount(group_of, (hashes >> np.uint64(32)).astype(np.float64), groups)
    counts = np.bincount(group_of, minlength=groups)
    return [
        (count, (int(upper) << 32) + int(lower) & _MASK)
        for count, upper, lower in zip(counts.tolist(), high.tolist(), low.tolist(), strict=True)
    ]


class Tally(Generic[Key]):
    """Accounts by key. One thread changes it; `copy` is for that thread, too, and what it gives for any."""

    def __init__(self) -> None:
        self.sums: dict[Key, Sum] = {}
        """Of all; a key that holds nothing is not there."""
        self.since = -(1 << 62)
        """Windows from this one on are kept apart, too."""
        self._late: dict[int, dict[Key, Sum]] = {}

    def add(self, key: Key, window: int, sum_: Sum) -> None:
        """More events of this key, whose tokens are of this window. Fewer, if they were counted before and
        the sum is negative.
        """
        _add(self.sums, key, sum_)
        if window >= self.since:
            _add(self._late.setdefault(window, {}), key, sum_)

    def move_on(self, window: int) -> None:
        """It is this window now: older ones are kept apart no longer than WINDOWS."""
        if window - WINDOWS > self.since:
            self.since = window - WINDOWS
            for old in [late for late in self._late if late < self.since]:
                del self._late[old]

    def forget(self, is_gone: Callable[[Key], bool]) -> int:
        """Let these keys go; how many events they had."""
        events = 0
        for key in [key for key in self.sums if is_gone(key)]:
            events += self.sums.pop(key)[0]
            for late in self._late.values():
                late.pop(key, None)
        return events

    def before(self, window: int) -> dict[Key, Sum]:
        """Without what tokens of this window and later ones hold; `window` is not before `since`."""
        sums = dict(self.sums)
        for number, late in self._late.items():
            if number >= window:
                for key, sum_ in late.items():
                    _add(sums, key, minus(NOTHING, sum_))
        return sums

    def rows(self) -> list[tuple[Key, int | None, int, int]]:
        """All of it: key, window (None: of all windows), events, sum of their hashes."""
        rows: list[tuple[Key, int | None, int, int]] = [(key, None, *sum_) for key, sum_ in self.sums.items()]
        for window, late in self._late.items():
            rows += [(key, window, *sum_) for key, sum_ in late.items()]
        return sorted(rows, key=lambda row: (row[0], row[1] is not None, row[1] or 0))

    def put(self, rows: Iterable[tuple[Key, int | None, int, int]]) -> None:
        """What `rows` gave of another one."""
        for key, window, events, sum_ in rows:
            into = self.sums if window is None else self._late.setdefault(window, {})
            into[key] = (events, sum_)

    def copy(self) -> "Tally[Key]":
        """As it is now."""
        tally: Tally[Key] = Tally()
        tally.sums, tally.since = dict(self.sums), self.since
        tally._late = {number: dict(late) for number, late in self._late.items()}
        return tally


def _add(sums: dict[Key, Sum], key: Key, sum_: Sum) -> None:
    together = plus(sums.get(key, NOTHING), sum_)
    if together == NOTHING:
        sums.pop(key, None)
    else:
        sums[key] = together
