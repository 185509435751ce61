"""Which worker has which slot: at first all have as many; later it goes by the load of each (paper 7.1).

A worker says how long it was busy with each of its slots. Over a window, that is what a slot weighs; slots
move when the busiest worker would have much less to do. All workers stop for a moment when they do, so the
windows become longer with each move: slots do not move for ever where that helps nobody.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.logs.shares import SLOTS

WINDOW_S: Final = 20.0
WINDOW_S_MAX: Final = 3600.0
BUSY_MIN: Final = 0.5
"""Of its time: a worker that has less to do loses nothing."""
GAIN_MIN: Final = 0.25
"""By so much, of its load, the busiest worker must be relieved."""

Seconds = npt.NDArray[np.float64]
"""SLOTS of them."""


def even(workers: int) -> tuple[int, ...]:
    """The worker of each slot."""
    return tuple(slot % workers for slot in range(SLOTS))


def slots_of(owners: Sequence[int], worker: int) -> list[int]:
    return [slot for slot, owner in enumerate(owners) if owner == worker]


def load_of(owners: Sequence[int], loads: Seconds) -> Seconds:
    """Of each worker."""
    return np.bincount(owners, loads, max(owners) + 1).astype(np.float64)


def balanced(owners: Sequence[int], loads: Seconds, stores: int = 1) -> tuple[int, ...]:
    """With slots moved, as few as it takes, from workers with much load to those with less. Each keeps one,
    and with several stores a slot stays in its own, of which every so manieth worker is."""
    moved = list(owners)
    workers = np.arange(max(owners) + 1)
    of_worker = load_of(owners, loads)
    for store in range(stores):
        there = workers[workers % stores == store]
        while True:
            most, least = there[of_worker[there].argmax()], there[of_worker[there].argmin()]
            apart = of_worker[most] - of_worker[least]
            mine = slots_of(moved, most)
            slot = min(mine, key=lambda slot: abs(loads[slot] - apart / 2))
            # With less, the two would only change places.
            if len(mine) == 1 or not 0.02 * apart < loads[slot] < 0.98 * apart:
                break
            moved[slot] = int(least)
            of_worker[most] -= loads[slot]
            of_worker[least] += loads[slot]
    return tuple(moved)


class Load:
    """How busy the workers of a round are, and with what. Times in seconds."""

    def __init__(self, owners: Sequence[int], stores: int = 1, moves: int = 0) -> None:
        """`moves`: that there were before."""
        self._owners, self._stores = tuple(owners), stores
        self._window_s = min(WINDOW_S * 2**moves, WINDOW_S_MAX)
        self._told: dict[int, tuple[float, Seconds]] = {}
        self._window: dict[int, tuple[float, Seconds]] = {}
        """What had been told when it began; a turn may be long, so each worker has a window of its own."""
        self.busy: dict[int, float] = {}
        """Of its time, each worker, lately."""

    def report(self, worker: int, spent: Sequence[float], now: float) -> None:
        """`spent`: on each slot, since the worker began."""
        told = np.array(spent, np.float64)
        before, so_far = self._told.get(worker, (now, told))
        if (told < so_far).any():  # it has begun again
            self._window = {}
        elif now > before:
            self.busy[worker] = float((told - so_far).sum()) / (now - before)
        self._told[worker] = now, told

    def better(self) -> tuple[int, ...] | None:
        """Who should have each slot, if a window is over in which that would have paid."""
        if len(self._told) <= max(self._owners):
            return None
        if not self._window:
            self._window = dict(self._told)
        loads = np.zeros(SLOTS)
        for worker, (now, told) in self._told.items():
            began, so_far = self._window[worker]
            if now < began + self._window_s:
                return None
            loads += (told - so_far) / (now - began)
        self._window = dict(self._told)
        busiest = load_of(self._owners, loads).max()
        if busiest < BUSY_MIN:
            return None
        moved = balanced(self._owners, loads, self._stores)
        return moved if load_of(moved, loads).max() <= (1 - GAIN_MIN) * busiest else None
