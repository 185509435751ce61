"""Puts finished batches into the ledger, all that are there in one transaction (group commit)."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dispatcher.ledger import Entry, Ledger
from dispatcher.reader import LogReader
from dispatcher.rules.events import (
    Batch,
    FreshBatch,
    Resolved,
    RetryBatch,
    due_us_of,
    pack_keys,
    pack_values,
    unpack_values,
)
from dispatcher.rules.verdicts import Totals
from photon.core.backoff import Backoff
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Fate
from photon.core.histogram import no_latencies
from photon.logs.files import FileState
from photon.logs.writer import dead_letter_lines

# --- The queue of events that wait for their retry (paper 3.2.1): on disk, in the order they fall due.
#
# In memory are only the keys of those being sent, so that none is sent twice at a time.

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


STORAGE_BACKOFF: Final = Backoff(0.1, 5.0)

Finished = tuple[Batch, Resolved]


class Recorder:
    """Used by one thread. `wait(tries)` sleeps after a failed commit, and is true when it is time to stop."""

    def __init__(
        self,
        ledger: Ledger,
        reader: LogReader,
        retries: RetryQueue,
        wait: Callable[[int], bool],
        recorded: Callable[[Sequence[FileState]], None],
    ) -> None:
        """`recorded` is told the states of files that are on disk."""
        self._ledger = ledger
        self._recorded = recorded
        self._reader = reader
        self._retries = retries
        self._wait = wait
        self._early: dict[int, Finished] = {}
        self._given_up = False
        self.storage_error: str | None = None
        """What keeps the ledger from being written now."""

    def record(self, group: Sequence[Finished]) -> list[Batch]:
        """Record those of the group, and of groups before, whose turn it is; they are returned.

        Tries until the disk takes them; [] if it was time to stop before. CorruptStateError, and StorageError
        where only a restart can mend it.
        """
        if self._given_up:
            return []
        ready = self._in_turn(group)
        entry, removed = self._entry(ready)
        keys = self._commit(entry)
        if keys is None:
            return []
        self._retries.settled(removed, keys)
        self._recorded(entry.files)
        return [batch for batch, _ in ready]

    def _in_turn(self, group: Sequence[Finished]) -> list[Finished]:
        ready: list[Finished] = []
        for batch, resolved in group:
            if isinstance(batch, RetryBatch):
                ready.append((batch, resolved))
                continue
            self._early[batch.number] = batch, resolved
            ready += [self._early.pop(number) for number in self._reader.finished(batch.number)]
        return ready

    def _entry(self, ready: Sequence[Finished]) -> tuple[Entry, list[bytes]]:
        events, wasted, latencies = 0, 0, no_latencies()
        fates: dict[Fate, int] = {}
        letters, files, removed = [], set(), []
        for batch, resolved in ready:
            if isinstance(batch, FreshBatch):
                events += len(batch.events) + len(batch.malformed)
                fates[Fate.MALFORMED] = fates.get(Fate.MALFORMED, 0) + len(batch.malformed)
                letters += batch.malformed
                files |= {span.file for span in batch.spans}
            else:
                removed += batch.keys
            for fate, count in resolved.fates.items():
                fates[fate] = fates.get(fate, 0) + count
            wasted += resolved.wasted_joins
            latencies += resolved.latencies
            letters += resolved.letters

        def due(sequence: int) -> list[bytes]:
            keys: list[bytes] = []
            for _, resolved in ready:
                keys += pack_keys(resolved.due_us, sequence + len(keys))
            return keys

        values = [v for _, r in ready if r.retries is not None for v in pack_values(r.retries)]
        totals = Totals(events, fates, wasted, latencies.tolist())
        states = self._reader.states(files)
        return Entry(states, totals, dead_letter_lines(letters), removed, due, values), removed

    def _commit(self, entry: Entry) -> list[bytes] | None:
        tries = 0
        while True:
            try:
                keys = self._ledger.record(entry)
            except CorruptStateError:
                raise
            except StorageError as error:
                self.storage_error = str(error)
                if self._ledger.broken:
                    raise
                tries += 1
                if self._wait(tries):
                    # Later batches of the same files must not be recorded over the gap this one leaves.
                    self._given_up = True
                    return None
            else:
                self.storage_error = None
                return keys
