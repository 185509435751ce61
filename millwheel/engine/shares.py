"""Which worker has which slot: at first all have as many; later it goes by the load of each (paper 7.1).

A worker says how long it was busy, and with which of its slots. Over a window, that is what a slot weighs;
slots move when a busy worker would have much less to do, and nobody as much as it had. All workers stop for a
moment when they do. So the next window is twice as long, and becomes shorter again with each in which slots
could stay: they do not move for ever where that helps nobody.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.engine.records import SLOTS

WINDOW_S: Final = 20.0
WINDOW_S_MAX: Final = 3600.0
BUSY_MIN: Final = 0.5
"""Of its time: a worker that has less to do loses nothing."""
OVERLOADED: Final = 0.8
"""Of its time: it falls behind, or soon will."""
GAIN_MIN: Final = 0.25
"""By so much, of its load, a worker must be relieved."""

HOT_SHARE: Final = 0.25
"""Of a computation's records in a worker."""
_KEYS_MAX: Final = 16
_RECORDS: Final = 1 << 17
"""After which what came before counts half."""

Seconds = npt.NDArray[np.float64]
"""SLOTS of them."""


class Shares(msgspec.Struct, frozen=True, array_like=True):
    """`owners`: the worker of each slot. `loads`: of each slot, when they were last moved. `window_s`: of the
    first window from then on."""

    owners: tuple[int, ...] = ()
    loads: tuple[float, ...] = ()
    window_s: float = WINDOW_S


class Work(NamedTuple):
    """What a worker has done since it began, by its own clock: seconds in all, and for each slot."""

    at: float
    busy: float
    spent: Sequence[float]


def even(workers: int) -> tuple[int, ...]:
    """The worker of each slot."""
    return tuple(slot % workers for slot in range(SLOTS))


def slots_of(owners: Sequence[int], worker: int) -> list[int]:
    return [slot for slot, owner in enumerate(owners) if owner == worker]


def load_of(owners: Sequence[int], loads: Seconds) -> Seconds:
    """Of each worker."""
    return np.bincount(owners, loads, max(owners) + 1).astype(np.float64)


def fitting(shares: Shares, workers: int, stores: int = 1) -> Shares:
    """As they are for so many workers, or made anew by what is known of the load."""
    if set(shares.owners) == set(range(workers)):
        return shares
    owners = even(workers)
    if shares.loads:
        owners = balanced(owners, np.array(shares.loads), stores)
    return Shares(owners, shares.loads)


def balanced(owners: Sequence[int], loads: Seconds, stores: int = 1) -> tuple[int, ...]:
    """With slots moved, as few as it takes, from workers with much load to those with less. Each keeps one,
    and with several stores a slot stays in its own, of which every so manieth worker is."""
    moved = list(owners)
    of_worker = load_of(owners, loads)
    for store in range(stores):
        there = list(range(store, len(of_worker), stores))
        while len(there) > 1:
            most, least = max(there, key=of_worker.__getitem__), min(there, key=of_worker.__getitem__)
            apart = of_worker[most] - of_worker[least]
            mine = slots_of(moved, most)
            slot = mine[int(np.abs(loads[mine] - apart / 2).argmin())]
            # With more than that the two would only change places; of less there would be no end.
            if len(mine) > 1 and apart / SLOTS < loads[slot] < 0.98 * apart:
                moved[slot] = least
                of_worker[most] -= loads[slot]
                of_worker[least] += loads[slot]
            else:
                there.remove(most)  # nothing relieves it
    return tuple(moved)


class Load:
    """How busy the workers of a round are, and with what."""

    def __init__(self, shares: Shares, stores: int = 1) -> None:
        self._owners, self._stores, self._window_s = shares.owners, stores, shares.window_s
        self._told: dict[int, Work] = {}
        self._window: dict[int, Work] = {}
        """What had been told when it began; a turn may be long, so each worker has a window of its own."""
        self.busy: dict[int, float] = {}
        """Of its time, each worker, lately."""
        self.overloaded: list[int] = []
        """Workers that were all but always busy in a window, and that no other shares relieve."""

    def begins(self, worker: int) -> None:
        """Again, or for the first time."""
        for known in (self._told, self.busy):
            known.pop(worker, None)
        self._window = {}

    def report(self, worker: int, work: Work) -> None:
        before = self._told.get(worker)
        if before is not None and work.at > before.at:
            self.busy[worker] = (work.busy - before.busy) / (work.at - before.at)
        self._told[worker] = work

    def better(self) -> Shares | None:
        """If a window is over in which other shares would have paid."""
        if len(self._told) <= max(self._owners):
            return None
        if not self._window:
            self._window = dict(self._told)
        loads = np.zeros(SLOTS)
        for worker, told in self._told.items():
            first = self._window[worker]
            if told.at < first.at + self._window_s:
                return None
            spent = np.subtract(told.spent, first.spent)
            if spent.any():  # with what else it was busy, commits for instance, it was for these
                loads += spent * ((told.busy - first.busy) / spent.sum() / (told.at - first.at))
        self._window = dict(self._told)
        owners = balanced(self._owners, loads, self._stores)
        if pays(load_of(self._owners, loads), load_of(owners, loads)):
            return Shares(owners, tuple(loads.tolist()), min(2 * self._window_s, WINDOW_S_MAX))
        self._window_s = max(self._window_s / 2, WINDOW_S)
        self.overloaded = np.flatnonzero(load_of(self._owners, loads) >= OVERLOADED).tolist()
        return None


def pays(before: Seconds, after: Seconds) -> bool:
    """Loads of workers: whether a busy one is relieved, and nobody who gets more has as much as it had."""
    limit = (1 - GAIN_MIN) * before
    most = after[after > before].max(initial=0.0)
    return bool(((before >= BUSY_MIN) & (after <= limit) & (most <= limit)).any())


class Heavy:
    """Which key of a computation has so many of its records that no move relieves the worker that has them.

    Counted is the first key of each batch, if it is the first of many (Misra and Gries, 1982): a key has at
    least the share that is told.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._records = 0

    def add(self, names: Sequence[str], records: npt.NDArray[np.int64]) -> None:
        """How many records each of these keys has, (N,)."""
        if not len(names):
            return
        first = int(records.argmax())
        key, count = names[first], int(records[first])
        self._records += int(records.sum())
        counts = self._counts
        if key in counts or len(counts) < _KEYS_MAX:
            counts[key] = counts.get(key, 0) + count
        else:
            self._less(min(count, *counts.values()))
        if self._records >= _RECORDS:
            self._records //= 2
            self._counts = {known: times // 2 for known, times in counts.items()}

    def _less(self, by: int) -> None:
        self._counts = {known: times - by for known, times in self._counts.items() if times > by}

    def first(self) -> tuple[str, float] | None:
        """The key with the most, and its share, if that is HOT_SHARE or more of many."""
        key = max(self._counts, key=self._counts.__getitem__, default=None)
        if key is None or self._records < _RECORDS // 64:
            return None
        share = self._counts[key] / self._records
        return (key, share) if share >= HOT_SHARE else None
