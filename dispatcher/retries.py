"""The queue of events that wait for their retry (paper 3.2.1): on disk, in the order they fall due.

In memory are only the keys of those being sent, so that none is sent twice at a time.
"""

import threading
from collections.abc import Iterable
from typing import Final

from dispatcher.ledger import Ledger
from dispatcher.rules.batches import RetryBatch
from dispatcher.rules.retry_entries import due_us_of, unpack_values

GATHER_US: Final = 5_000
"""Entries that fall due so soon after each other are sent together."""


class RetryQueue:
    """Takes what is due. Usable from several threads."""

    def __init__(self, ledger: Ledger, delay_us_max: int, bytes_max: int) -> None:
        """`bytes_max` bounds the values of a batch (the one that reaches it is in)."""
        self._ledger = ledger
        # An entry due later than any delay allows was written before the clock was set back.
        self._wait_us_max = 2 * delay_us_max + GATHER_US
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._in_flight: set[bytes] = set()
        self._position = b""  # before it, all is in flight
        self._next_due_us: int | None = 0  # not later than the next entry falls due

    def next_due_us(self) -> int | None:
        """When to ask again; None while nothing waits."""
        return self._next_due_us

    def take(self, now_us: int, count_max: int) -> RetryBatch | None:
        """At most `count_max` events that are due, soonest first. They are in flight until `settled`."""
        next_due_us = self._next_due_us
        if next_due_us is None or 0 < next_due_us - now_us <= self._wait_us_max:
            return None
        return self._take(now_us, count_max, early=False)

    def take_early(self, now_us: int, count_max: int) -> RetryBatch | None:
        """The same, due or not."""
        return self._take(now_us, count_max, early=True)

    def settled(self, removed: Iterable[bytes], added: Iterable[bytes]) -> None:
        """The ledger has recorded what became of these, and has new ones."""
        with self._mutex:
            self._in_flight.difference_update(removed)
            first = min(added, default=None)
            if first is None:
                return
            self._position = min(self._position, first)
            due_us = due_us_of(first)
            if self._next_due_us is None or due_us < self._next_due_us:
                self._next_due_us = due_us

    def _take(self, now_us: int, count_max: int, early: bool) -> RetryBatch | None:
        with self._mutex:
            next_due_us: int | None = None
            left = count_max

            def wanted(key: bytes) -> bool | None:
                nonlocal left, next_due_us
                if key in self._in_flight:
                    self._position = key
                    return False
                due_us = due_us_of(key)
                due = early or not GATHER_US < due_us - now_us <= self._wait_us_max
                if not due or not left:
                    next_due_us = due_us
                    return None
                left -= 1
                self._position = key
                return True

            found = self._ledger.retries_from(self._position, wanted, self._bytes_max)
            if found and next_due_us is None:
                next_due_us = 0  # stopped by the bytes, or at the end: the next call finds out
            self._next_due_us = next_due_us
            if not found:
                return None
            keys = [key for key, _ in found]
            self._in_flight.update(keys)
        try:
            events = unpack_values([value for _, value in found])
        except ValueError as error:  # UnicodeDecodeError too
            raise self._ledger.corrupt(f"a retry entry: {error}") from error
        return RetryBatch(keys, events, early)
