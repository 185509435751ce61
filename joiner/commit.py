"""A batch from its intent to its end: intend, register, write the winners, end the intent.

One way for requests and for the resolver, which ends the batches whose request could not: unknown
registration, full disk, crash of the process before. It registers them again, with the same token, until the
IdRegistry answers: then it is known which events are this joiner's (paper 3.3.2), and they are written.

A batch of a life before whose incarnation is fenced can't: recovery releases any of its ids that it finds in
no joined log. Nothing of it stands in ours (joiner.output), so its ids are released here too, as far as it
holds them still, and it is begun anew in the name of this life, against whoever else does so.

While a log can't be written, the gate keeps requests away: a full disk is no reason to look up and register.
"""

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from idregistry.client import RegistryClient
from joiner.intents import Intent, IntentJournal, Range
from joiner.leases import Lease, LeaseKeeper
from joiner.output import Checkpoint, JoinedLog
from joiner.rules import winning_lines
from photon.core.accounts import Sum, sums_by_day
from photon.core.clock import Background, Backoff, Clock
from photon.core.columns import take_ids, take_times
from photon.core.disk import storage_errors, write_all
from photon.core.errors import OverloadedError, StorageError, UnavailableError, told
from photon.core.fates import Committed, Released

PROBE_INTERVAL_S: Final = 0.5
PROBE_BYTES: Final = 1 << 20
"""About what one batch takes."""
DELAYS: Final = Backoff(0.05, 2.0)
"""Between the resolver's tries."""


class Slots:
    """Lets only so many in at a time; for many threads at once."""

    def __init__(self, limit: int, refusal: str) -> None:
        self.in_flight = 0
        self._limit = limit
        self._refusal = refusal
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, timeout_s: float | None) -> Iterator[None]:
        """One of the slots, waited for so long; None: for ever. OverloadedError: nothing was done."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.in_flight < self._limit, timeout_s):
                raise OverloadedError(f"{self._limit} {self._refusal}")
            self.in_flight += 1
        try:
            yield
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify()


class StorageGate:
    """Shut by a failed write of a log, open again when a write to that log works, or a `probe`, which is for
    who answers health checks: these say NOT_SERVING while it is shut. For many threads at once.
    """

    def __init__(self, clock: Clock, on_fatal: Callable[[BaseException], None]) -> None:
        """`on_fatal` is told of a failure that only a restart can mend."""
        self._clock = clock
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._failures: dict[str, StorageError] = {}
        self._broken = False
        self._next_probe = 0.0

    @property
    def error(self) -> StorageError | None:
        """What is wrong."""
        return next(iter([*self._failures.values()]), None)

    def check(self) -> None:
        """StorageError while it is shut."""
        if (error := self.error) is not None:
            raise type(error)(str(error))

    def probe(self, directories: Sequence[Path]) -> None:
        """Where it is shut, every PROBE_INTERVAL_S: open it if all these take a write."""
        with self._lock:
            now_s = self._clock.monotonic()
            if not self._failures or self._broken or now_s < self._next_probe:
                return
            self._next_probe = now_s + PROBE_INTERVAL_S
        try:
            for directory in directories:
                try_writing(directory)
        except StorageError:
            return
        with self._lock:
            self._failures.clear()

    def failed(self, log: str, error: StorageError, broken: bool) -> None:
        """`broken`: no later write to that log will work."""
        with self._lock:
            self._failures[log] = error
            self._broken |= broken
            self._next_probe = self._clock.monotonic() + PROBE_INTERVAL_S
        if broken:
            self._on_fatal(error)

    def worked(self, log: str) -> None:
        if log in self._failures:
            with self._lock:
                self._failures.pop(log, None)


def try_writing(directory: Path) -> None:
    """StorageError where a batch could not be written; leaves nothing behind."""
    with storage_errors(directory), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        write_all(file.fileno(), bytes(PROBE_BYTES))
        os.fsync(file.fileno())


@dataclass(slots=True, eq=False)
class Unended:
    """An intent on the way to its end; each step is taken once, however often the whole is tried."""

    intent: Intent
    lease: Lease
    """Its incarnation's."""
    committed: bytes | None = None
    """The registry's answer (core.fates.Committed), once it is known."""
    place: Range | None = None
    """Where its lines stand, once they do."""


class Settler:
    """Takes batches to their end. For many threads at once, each with a batch of its own."""

    def __init__(
        self,
        registry: RegistryClient,
        journal: IntentJournal,
        output: JoinedLog,
        gate: StorageGate,
        leases: LeaseKeeper,
        commits_max: int,
        checkpoint: Checkpoint,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_ended` is told when lines stand for good."""
        self.slots = Slots(
            commits_max,
            "commits are on their way to the IdRegistry and none ended in time; "
            "send again later or raise joiner.commits_in_flight_max",
        )
        """Of commits to the IdRegistry (paper 3.3.2): they bound what a crash leaves."""
        self.joined = 0
        """Lines written by this process."""
        self._registry = registry
        self._journal = journal
        self._output = output
        self._gate = gate
        self._leases = leases
        self._checkpoint = checkpoint
        self._on_ended = on_ended
        self._lock = threading.Lock()

    def intend(self, intent: Intent, check_deadline: Callable[[], None]) -> Unended:
        """Note durably what is going to be registered. StorageError, OverloadedError: nothing was done."""
        try:
            self._journal.append(intent, lambda: self._output.position)
            self._checkpoint("intent appended")
            self._journal.sync(intent)
            check_deadline()
        except (StorageError, OverloadedError) as error:
            if isinstance(error, StorageError):
                self._gate.failed("journal", error, self._journal.broken)
            if intent.sequence >= 0:  # nothing is asked of the registry, so nothing is left to end
                self._journal.ended(intent)
            raise
        self._gate.worked("journal")
        self._checkpoint("intent synced")
        return Unended(intent, self._leases.own)

    def settle(self, batch: Unended) -> None:
        """Take the batch to its end, whatever was done before; errors as of `register` and `finish`."""
        if batch.committed is None:
            with self.slots.taken(None):
                self.register(batch)
        self.finish(batch)

    def begin_anew(self, batch: Unended, token: bytes) -> None:
        """Take a batch of a fenced life over, under a token of this one; again has no effect.

        UnavailableError, StorageError, OverloadedError: to be called again with the same batch.
        """
        old = batch.intent
        released = self._registry.release(old.ids, old.times, [old.token], [len(old)])
        if Released.NOT_FENCED in released:
            raise UnavailableError("not every shard of the IdRegistry knows of the fence yet")
        anew = self.intend(Intent(token, old.ids, old.times, old.lines), lambda: None)
        self._journal.ended(old)
        self._leases.ended(batch.lease)
        batch.intent, batch.lease, batch.committed = anew.intent, anew.lease, None

    def register(self, batch: Unended) -> None:
        """Learn which of its events are this joiner's; again has no effect.

        UnavailableError: not known, to be called again with the same batch. OverloadedError is one: its lease
        does not run.
        """
        if batch.committed is None:
            self._leases.check(batch.lease)
            intent = batch.intent
            committed = self._registry.commit(intent.ids, intent.times, intent.token)
            if len(committed) != len(intent):
                raise UnavailableError(
                    f"the IdRegistry answered {len(committed)} outcomes for {len(intent)} ids: "
                    "mixed versions?"
                )
            if Committed.FENCED in committed:  # by one shard, so soon by all
                self._leases.fenced(batch.lease)
                raise UnavailableError(f"incarnation {batch.lease.incarnation:016x} is fenced")
            batch.committed = committed

    def finish(self, batch: Unended) -> bytes:
        """Write what is registered; the registry's answer (K core.fates.Committed).

        StorageError, OverloadedError: it is not there yet, to be called again with the same batch.
        """
        assert batch.committed is not None
        self._checkpoint("registered")
        try:
            self._write(batch, winning_lines(batch.committed, batch.intent.lines))
        except StorageError as error:
            self._gate.failed("output", error, self._output.broken)
            raise
        self._leases.ended(batch.lease)
        self._checkpoint("done")
        return batch.committed

    def _write(self, batch: Unended, lines: bytes) -> None:
        assert batch.committed is not None
        if not lines:
            self._journal.ended(batch.intent)
            return
        if batch.place is None:
            days = _won_by_day(batch.intent, batch.committed)
            written = partial(self._journal.written, batch.intent, days=days)
            batch.place = self._output.append(lines, partial(self._leases.check, batch.lease), written)
            with self._lock:
                self.joined += batch.committed.count(Committed.WON)
        self._checkpoint("output appended")
        self._output.sync(batch.place)
        self._gate.worked("output")
        self._checkpoint("output synced")
        self._journal.synced(batch.place)
        self._on_ended()


def _won_by_day(intent: Intent, committed: bytes) -> dict[int, Sum]:
    won = np.frombuffer(committed, np.uint8) == Committed.WON
    return sums_by_day(take_ids(intent.ids, won), take_times(intent.times, won))


class Resolver:
    """A thread that works off the unresolved batches in turn, with growing pauses while none can be ended."""

    def __init__(
        self, settle: Callable[[Unended], object], rng: Random, notice: Callable[[str], None]
    ) -> None:
        self._settle = settle
        self._rng = rng
        self._notice = notice
        self._changed = threading.Condition()
        self._batches: deque[Unended] = deque()
        self.unresolved_bytes = 0
        """Bytes of joined lines that they hold."""
        self._failures = 0
        self._trouble = ""
        self._work = Background("resolver", self._step)

    @property
    def unresolved(self) -> int:
        """How many batches wait for their end."""
        return len(self._batches)

    def add(self, batch: Unended) -> None:
        with self._changed:
            self._batches.append(batch)
            self.unresolved_bytes += len(batch.intent.lines)
            first = len(self._batches) == 1
        if first:  # else it is at work, or pauses
            self._work.wake()

    def start(self) -> None:
        self._work.start()

    def stop(self, patience_s: float) -> bool:
        """End, when all is resolved or after so long; whether all is. The rest waits for the next start."""
        with self._changed:
            self._changed.wait_for(lambda: not self._batches, patience_s)
        self._work.stop(patience_s)
        return not self._batches

    def _step(self) -> float:
        """Take one batch; the seconds until the next one."""
        if not self._batches:
            return float("inf")
        batch = self._batches[0]
        resolved = self._resolve(batch)
        with self._changed:
            self._batches.popleft()
            if resolved:
                self.unresolved_bytes -= len(batch.intent.lines)
            else:
                self._batches.append(batch)  # the others may do better: each shard has its own leader
            self._changed.notify_all()
        self._failures = 0 if resolved else self._failures + 1
        # All that wait share the pauses: one turn around the queue is as long as a single batch's pause.
        pause_s = DELAYS.delay_s(self._failures, self._rng.uniform) if self._failures else 0.0
        return pause_s / max(1, len(self._batches))

    def _resolve(self, batch: Unended) -> bool:
        try:
            self._settle(batch)
        except Exception as error:
            # Of any kind: the batch must not be forgotten with the thread.
            trouble = told(error)
            if trouble != self._trouble:
                self._notice(f"{len(self._batches)} batches wait for their end: {trouble}")
            self._trouble = trouble
            return False
        self._trouble = ""
        return True
