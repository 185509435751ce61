"""Which waiting events an arrived primary event wakes. Pure.

A primary event may arrive after a lookup has missed it and before the ledger has the retry: so arrivals are
remembered for a while. Of very many events only the newest are known; the others wait for their backoff.
"""

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

AWAITED_MAX: Final = 1 << 17
"""Events that are known; then the older half is forgotten. 250 bytes each."""
ARRIVED_MAX: Final = 1 << 16
"""Arrivals that are remembered, likewise. 110 bytes each."""

Key = TypeVar("Key", bound=Hashable)
"""Of an event: of a retry in the ledger, or a batch and a row. No set."""


class Awaited(Generic[Key]):
    """Not for several threads at once."""

    def __init__(self, awaited_max: int = AWAITED_MAX, arrived_max: int = ARRIVED_MAX) -> None:
        self._awaited_half = awaited_max // 2
        self._arrived_half = arrived_max // 2
        self._newer: dict[bytes, Key | set[Key]] = {}
        """Primary id -> the key of the event that waits for it, or the keys of several."""
        self._older: dict[bytes, Key | set[Key]] = {}
        self._in_newer = 0
        self._arrived: set[bytes] = set()
        self._arrived_before: set[bytes] = set()

    def add(self, keys: Sequence[Key], primary_ids: Sequence[bytes]) -> list[Key]:
        """These wait from now on. The keys of those whose primary events have arrived meanwhile.

        An arrival is used up: an event that is tried once more, and in vain again, waits.
        """
        arrived = self._arrived.intersection(primary_ids) | self._arrived_before.intersection(primary_ids)
        self._arrived -= arrived
        self._arrived_before -= arrived
        woken = []
        for key, primary_id in zip(keys, primary_ids, strict=True):
            if primary_id in arrived:
                woken.append(key)
                continue
            if self._in_newer >= self._awaited_half:
                self._older, self._newer, self._in_newer = self._newer, {}, 0
            self._in_newer += 1
            held = self._newer.get(primary_id)
            if held is None:
                self._newer[primary_id] = key
            elif isinstance(held, set):
                held.add(key)
            else:
                self._newer[primary_id] = {held, key}
        return woken

    def drop(self, key: Key, primary_id: bytes) -> None:
        """It waits no more."""
        for waiting in (self._newer, self._older):
            held = waiting.get(primary_id)
            if isinstance(held, set) and key in held:
                held.remove(key)
            elif held != key:
                continue
            self._in_newer -= waiting is self._newer
            if not held or held == key:
                del waiting[primary_id]

    def arrive(self, primary_ids: Sequence[bytes]) -> list[Key]:
        """Keys of events that wait for these."""
        newest = primary_ids[-self._arrived_half :]
        if len(self._arrived) + len(newest) > self._arrived_half:
            self._arrived_before, self._arrived = self._arrived, set()
        self._arrived.update(newest)
        woken: list[Key] = []
        for primary_id in primary_ids:
            for waiting in (self._newer, self._older):
                held = waiting.pop(primary_id, None)
                if held is not None:
                    keys = held if isinstance(held, set) else [held]
                    self._in_newer -= len(keys) * (waiting is self._newer)
                    woken += keys
        return woken
