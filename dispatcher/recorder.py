"""Puts what became of events into the ledger, and into the book of a share that others may go on with."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.checkpoint import Book, Places
from dispatcher.ledger import Entry, Ledger, RetryQueue
from dispatcher.reader import LogReader
from dispatcher.rules.events import NO_EVENTS, Batch, Events, FreshBatch, Resolved, RetryBatch, pack_values
from dispatcher.rules.verdicts import Totals, none_joined
from dispatcher.sender import Gate
from photon.core.clock import Backoff
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Differing, Fate
from photon.logs.files import FileState
from photon.logs.writer import dead_letter_lines

STORAGE_BACKOFF: Final = Backoff(0.1, 5.0)

_NONE_DUE: Final = np.empty(0, np.int64)

Finished = tuple[Batch, Resolved]
Recorded = Callable[[Sequence[FileState]], None]
"""Told the states of files that are on disk."""


class Recorder:
    """Puts finished batches into the ledger, all that are there in one transaction. Used by one thread."""

    def __init__(
        self,
        ledger: Ledger,
        reader: LogReader,
        retries: RetryQueue,
        gate: Gate,
        recorded: Recorded,
        book: Book | None = None,
    ) -> None:
        self._ledger = ledger
        self._reader = reader
        self._retries = retries
        self._gate = gate
        self._recorded = recorded
        self._book = book
        self._early: dict[int, Finished] = {}
        self._given_up = False
        self.storage_error: str | None = None

    def record(self, group: Sequence[Finished]) -> Sequence[Finished]:
        """Record those of the group, and of groups before, whose turn it is; they are returned.

        Tries until the disk takes them; [] if it was time to stop before. CorruptStateError, and StorageError
        where only a restart can mend it.
        """
        if self._given_up:
            return []
        ready = self._in_turn(group)
        entry = self._entry(ready)
        keys = self._commit(entry)
        if keys is None:
            return []
        if self._book is not None:
            self._book.note(entry.files, *_places(ready))
        self._retries.settled(entry.retries_removed, keys, entry.retries)
        self._recorded(entry.files)
        return ready

    def _in_turn(self, group: Sequence[Finished]) -> list[Finished]:
        ready: list[Finished] = []
        for batch, resolved in group:
            if isinstance(batch, RetryBatch):
                ready.append((batch, resolved))
                continue
            self._early[batch.number] = batch, resolved
            ready += [self._early.pop(number) for number in self._reader.finished(batch.number)]
        return ready

    def _entry(self, ready: Sequence[Finished]) -> Entry:
        events, wasted, latencies = 0, 0, none_joined()
        fates: dict[Fate, int] = {}
        letters, files, removed, values = [], set(), [], []
        differing = Counter[Differing]()
        for batch, resolved in ready:
            if isinstance(batch, FreshBatch):
                events += batch.count
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
            differing.update(resolved.differing)
            if resolved.retries is not None:
                values += pack_values(resolved.retries)
        states, lost_bytes = self._reader.states(files)
        totals = Totals(events, fates, wasted, latencies.tolist(), lost_bytes, differing)
        due_us = np.concatenate([_NONE_DUE, *[resolved.due_us for _, resolved in ready]])
        placed = [] if self._book is None else letters
        return Entry(states, totals, dead_letter_lines(letters), removed, due_us, values, placed)

    def _commit(self, entry: Entry) -> list[bytes] | None:
        failures = 0
        while True:
            try:
                keys = self._ledger.record(entry)
            except CorruptStateError:
                raise
            except StorageError as error:
                self.storage_error = str(error)
                if self._ledger.broken:
                    raise
                failures += 1
                if self._gate.wait(STORAGE_BACKOFF, failures):
                    # Later batches of the same files must not be recorded over the gap this one leaves.
                    self._given_up = True
                    return None
            else:
                self.storage_error = None
                return keys


def _places(ready: Sequence[Finished]) -> tuple[Places, Places]:
    """Of the events that wait from now on, and of those that wait no more."""
    opened = [NO_EVENTS, *(r.retries for b, r in ready if r.retries and isinstance(b, FreshBatch))]
    ended = [NO_EVENTS]
    for batch, resolved in ready:
        if isinstance(batch, RetryBatch):
            again = NO_EVENTS if resolved.retries is None else resolved.retries
            still = np.isin(_joined(batch.events), _joined(again))
            ended.append(batch.events.take(np.flatnonzero(~still)))
    return _places_of(opened), _places_of(ended)


def _places_of(parts: Sequence[Events]) -> Places:
    return np.concatenate([one.files for one in parts]), np.concatenate([one.offsets for one in parts])


def _joined(events: Events) -> npt.NDArray[np.void]:
    """File and offset of each event as one value."""
    places = np.empty(len(events), [("file", "<u4"), ("offset", "<i8")])
    places["file"], places["offset"] = events.files, events.offsets
    return places
