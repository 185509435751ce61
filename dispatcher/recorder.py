"""Puts finished batches into the ledger, all that are there in one transaction (group commit)."""

from collections.abc import Callable, Sequence
from typing import Final

from dispatcher.ledger import Entry, Ledger
from dispatcher.reader import LogReader
from dispatcher.retries import RetryQueue
from dispatcher.rules.backoff import Backoff
from dispatcher.rules.batches import Batch, FreshBatch, Resolved, RetryBatch
from dispatcher.rules.retry_entries import pack_keys, pack_values
from dispatcher.rules.totals import Totals
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Fate
from photon.core.histogram import no_latencies
from photon.logs.files import FileState
from photon.logs.writer import dead_letter_lines

STORAGE_BACKOFF: Final = Backoff(100_000, 5_000_000)

Finished = tuple[Batch, Resolved]


class Recorder:
    """Used by one thread. `wait(tries)` sleeps after a failed commit, and is true when it is time to stop."""

    def __init__(
        self,
        ledger: Ledger,
        reader: LogReader,
        retries: RetryQueue,
        wait: Callable[[int], bool],
        recorded: Callable[[Sequence[FileState]], None] = lambda _: None,
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
