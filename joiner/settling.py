"""The end of a batch: register, write the winners, end the intent. One way for requests and resolver.

Or the batch is dropped, because its incarnation is fenced: then recovery may release any of its ids that has
no line in the joined log, and nothing of it is written any more.
"""

import threading
from collections import Counter
from functools import partial
from typing import Final

from joiner.intent_records import Intent, Range
from joiner.intents import IntentJournal
from joiner.lease import Lease
from joiner.lease_keeper import LeaseKeeper
from joiner.output import JoinedLog
from joiner.ports import Checkpoint, Registry
from joiner.rules import winning_lines
from joiner.storage_gate import StorageGate
from photon.core.columns import join_lines, split_lines
from photon.core.errors import StorageError, UnavailableError
from photon.core.fates import Committed

_WON: Final = bytes([Committed.WON])
_FENCED: Final = bytes([Committed.FENCED])


class WrittenLines:
    """Lines in the joined log that belong to intents without an end; each counts for one of them, once."""

    def __init__(self, counts: Counter[bytes]) -> None:
        self._counts = counts

    def take(self, lines: list[bytes]) -> list[bytes]:
        """The lines that are missing in the log; those that are there are used up."""
        missing = []
        for line in lines:
            if self._counts[line] > 0:
                self._counts[line] -= 1
            else:
                missing.append(line)
        return missing


class Unended:
    """An intent on the way to its end; each step is taken once, however often the whole is tried.

    `lease`: its incarnation's. `written`: what a process before this one may have written of it.
    """

    def __init__(self, intent: Intent, lease: Lease, written: WrittenLines | None = None) -> None:
        self.intent = intent
        self.lease = lease
        self.committed: bytes | None = None
        """The registry's answer (core.fates.Committed), once it is known."""
        self._written = written
        self._missing: bytes | None = None
        self.place: Range | None = None
        """Where its lines stand, once they do."""

    def missing_count(self) -> int:
        """How many those are. Counting newlines in the lines would take as long as splicing them."""
        assert self.committed is not None and self._missing is not None
        if self._written is None:
            return self.committed.count(Committed.WON)
        return self._missing.count(b"\n")

    def missing_lines(self) -> bytes:
        """What of the lines that won is not in the joined log."""
        assert self.committed is not None
        if self._missing is None:
            won = winning_lines(self.committed, self.intent.lines)
            self._missing = won if self._written is None else join_lines(self._written.take(split_lines(won)))
        return self._missing


class Settler:
    """Registers and writes. For many threads at once, each with a batch of its own."""

    def __init__(
        self,
        registry: Registry,
        journal: IntentJournal,
        output: JoinedLog,
        gate: StorageGate,
        leases: LeaseKeeper,
        checkpoint: Checkpoint,
    ) -> None:
        self._registry = registry
        self._journal = journal
        self._output = output
        self._gate = gate
        self._leases = leases
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._joined = 0
        self._dropped = 0

    @property
    def joined(self) -> int:
        """Lines written by this process."""
        return self._joined

    @property
    def dropped(self) -> int:
        """Events of fenced incarnations that this process did not write, though they may be registered."""
        return self._dropped

    def settle(self, batch: Unended) -> bytes:
        """Take the batch to its end: `register` and `finish`."""
        self.register(batch)
        return self.finish(batch)

    def register(self, batch: Unended) -> None:
        """Learn which of its events are this joiner's, or that it is fenced; again has no effect.

        UnavailableError: not known, to be called again with the same batch. OverloadedError is one: its lease
        does not run.
        """
        if batch.committed is None and not batch.lease.fenced:
            self._leases.check(batch.lease)
            batch.committed = self._commit(batch.intent)
            if Committed.FENCED in batch.committed:  # by one shard, so soon by all
                self._leases.fenced(batch.lease)

    def finish(self, batch: Unended) -> bytes:
        """Write what is registered; the registry's answer (K core.fates.Committed), FENCED for WON where the
        batch is dropped.

        StorageError, OverloadedError: it is not there yet, to be called again with the same batch.
        """
        if batch.lease.fenced and batch.place is None:
            return self._drop(batch)
        assert batch.committed is not None
        self._checkpoint("registered")
        try:
            self._write(batch)
        except StorageError as error:
            self._gate.failed("output", error, self._output.broken)
            raise
        self._leases.ended(batch.lease)
        self._checkpoint("done")
        return batch.committed

    def _drop(self, batch: Unended) -> bytes:
        committed = (batch.committed or _WON * len(batch.intent)).replace(_WON, _FENCED)
        with self._lock:
            self._dropped += committed.count(_FENCED)
        self._journal.done(batch.intent, Range(batch.intent.position.file, 0, 0))
        self._leases.ended(batch.lease)
        return committed

    def _commit(self, intent: Intent) -> bytes:
        committed = self._registry.commit(intent.ids, intent.times, intent.token)
        if len(committed) != len(intent):
            raise UnavailableError(
                f"the IdRegistry answered {len(committed)} outcomes for {len(intent)} ids: mixed versions?"
            )
        return committed

    def _write(self, batch: Unended) -> None:
        lines = batch.missing_lines()
        if batch.place is None:
            batch.place = self._output.append(lines, partial(self._leases.check, batch.lease))
            with self._lock:
                self._joined += batch.missing_count()
        self._checkpoint("output appended")
        # Also when nothing is missing: what a crashed process wrote may not be durable yet.
        self._output.sync(batch.place)
        if lines:
            self._gate.worked("output")
        self._checkpoint("output synced")
        self._journal.done(batch.intent, batch.place)
