"""The threads of the dispatcher: one reads, several send, one records; bounded all the way.

    reader and retry queue -> [batches to send] -> senders -> [finished batches] -> recorder -> ledger

The life of a batch:

state     by            until                                    a kill now means
--------  ------------  ---------------------------------------  ---------------------------------------------
read      reader        a sender takes it, retries first         its lines are read again
taken     retry queue   the same; it was read before             its entries are in the ledger and come again
sent      a sender      registry and joiner have answered        the same; what is registered is a duplicate
held      the sender    a joiner answers again: it waits whole   the same
resolved  the sender    each event has a fate or waits; fresh    the same
                        ones: those before it in their files
                        are resolved, too
recorded  the recorder  its transaction is on disk               it counts; what waits is in the retry queue

A batch is in flight from when it is read until it is recorded, and only so many are: when joiners or the disk
are slow, reading stops.
"""

import enum
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np

from dispatcher.ledger import Ledger
from dispatcher.reader import LogReader
from dispatcher.recorder import STORAGE_BACKOFF, Finished, Recorder, RetryQueue
from dispatcher.rules.backoff import AgeBackoff, Backoffs
from dispatcher.rules.events import Batch, FreshBatch, Resolved, RetryBatch
from dispatcher.rules.pacing import Reading
from dispatcher.rules.verdicts import resolve
from dispatcher.sender import Gate, Sender
from photon.core.backoff import Backoff
from photon.core.clock import Clock
from photon.core.errors import UnavailableError
from photon.core.histogram import no_latencies
from photon.core.settings import Dispatcher
from photon.logs.files import FileState

GATHER_COMMITS_S: Final = 0.01
"""What finishes within so long is one transaction: idle traffic costs few fsyncs."""

_WAIT_S_MIN: Final = 0.001
_NOTHING_RESOLVED: Final = Resolved({}, 0, no_latencies(), [], None, np.empty(0, np.int64))


class _Signal(enum.Enum):
    """To the recorder, between the batches."""

    FILES_CHANGED = enum.auto()
    """There are states of files to record, perhaps nothing else."""
    END = enum.auto()


class Driver:
    """Runs from `start` to `stop`. `failure`: what ended it before, if anything did."""

    def __init__(
        self,
        settings: Dispatcher,
        poll_interval_s: float,
        ledger: Ledger,
        reader: LogReader,
        retries: RetryQueue,
        gate: Gate,
        sender: Sender,
        stopping: threading.Event,
        clock: Clock,
        rng: random.Random,
        notice: Callable[[str], None],
        recorded: Callable[[Sequence[FileState]], None],
        may_begin: Callable[[], bool],
    ) -> None:
        """`stopping`: set by `stop` and by failures, the sender waits for it, too; `recorded` as Recorder's;
        `may_begin`: asked before anything is read; False when it is time to stop.
        """
        self._settings = settings
        self._poll_interval_s = poll_interval_s
        self._ledger = ledger
        self._reader = reader
        self._retries = retries
        self._clock = clock
        self._rng = rng
        self._notice = notice
        self._may_begin = may_begin
        self._stopping = stopping
        self._wake = threading.Event()
        reader.ring(self._wake.set)
        self._sender = sender
        self._recorder = Recorder(ledger, reader, retries, self._wait_for_disk, recorded)
        self._backoffs = backoffs_of(settings)
        self._to_send = WaitingBatches(rng)
        self._finished: SimpleQueue[Finished | _Signal] = SimpleQueue()
        self._gate = gate
        self._paused: str | None = None
        self._caught_up = False
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        """Set on `stop` and on failure."""
        self._senders = [self._thread("send", self._send_all) for _ in range(settings.batches_in_flight_max)]
        self._source = self._thread("read", self._read_all)
        self._writer = self._thread("record", self._record_all)

    @property
    def storage_error(self) -> str | None:
        return self._recorder.storage_error

    @property
    def in_flight(self) -> int:
        """Events read or taken for a retry, and not recorded."""
        with self._gate.pacing() as pacing:
            return pacing.fresh_events + pacing.retry_events

    @property
    def paused(self) -> str | None:
        """Why no new events are read, if it is not that all are."""
        return self._paused

    @property
    def at_rest(self) -> bool:
        """All whole lines that are there are read, and what became of them is on disk."""
        with self._gate.pacing() as pacing:
            return self._caught_up and not pacing.fresh_batches and not pacing.retry_batches

    @property
    def idle(self) -> bool:
        """At rest, and each event has its fate."""
        return self.at_rest and not self._ledger.pending

    def start(self) -> None:
        for thread in (self._writer, *self._senders, self._source):
            thread.start()

    def stop(self) -> None:
        """Read no more, let what is under way end and record it. What a joiner does not answer is left."""
        self._stopping.set()
        self._wake.set()
        if self._source.ident is None:
            self.ended.set()
            return  # never started
        self._source.join()
        self._to_send.close()
        for thread in self._senders:
            thread.join()
        self._finished.put(_Signal.END)
        self._writer.join()
        self.ended.set()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # the process must end, not go on without one of its threads
                self.failure = self.failure or error
                self._stopping.set()
                self._wake.set()
                self.ended.set()

        return threading.Thread(target=run, name=f"dispatcher-{name}", daemon=True)

    # The reading thread.

    def _read_all(self) -> None:
        if not self._may_begin():
            return
        while not self._stopping.is_set():
            self._wake.clear()
            if self._reader.look():
                self._finished.put(_Signal.FILES_CHANGED)
            sent = self._send_retries()
            sent = self._send_fresh() or sent
            if not sent:
                self._wake.wait(self._wait_s())

    def _wait_s(self) -> float:
        due_us = self._retries.next_due_us()
        longest_s = self._reader.patience_s if self._caught_up else self._poll_interval_s
        with self._gate.pacing() as pacing:
            pause_s = pacing.wait_s(self._clock.monotonic())
        if due_us is None or pause_s is None:
            return longest_s
        wait_s = max(pause_s, (due_us - self._clock.now_us()) / 1e6)
        return max(_WAIT_S_MIN, min(longest_s, wait_s))

    def _send_fresh(self) -> bool:
        """One batch, so that a long backlog keeps neither retries nor new files waiting."""
        if not self._may_read():
            self._caught_up = False
            return False
        batch = self._reader.next_batch()
        if batch is None:
            self._caught_up = self._reader.caught_up
            return False
        self._caught_up = False
        with self._gate.pacing() as pacing:
            pacing.read(batch.count, batch.size, self._clock.monotonic())
        self._submit(batch)
        return True

    def _may_read(self) -> bool:
        pending = self._ledger.pending
        with self._gate.pacing() as pacing:
            may = pacing.may_read(pending, self._clock.monotonic())
        if may is not Reading.AHEAD:
            self._tell_pause(may, pending)
        return may is Reading.READ

    def _tell_pause(self, may: Reading, pending: int) -> None:
        if may is Reading.FULL:
            bound = self._settings.retry_queue_events_max
            # Without the present number: a notice that says the same is told once.
            self._notice(
                f"as many events wait for a retry as 'dispatcher.retry_queue_events_max' ({bound}) allows: "
                "no new ones are read until some of them have joined; see whether their primaries are read"
            )
            self._paused = f"{pending} events wait for their retry, 'retry_queue_events_max' is {bound}"
        elif may is Reading.BEHIND:
            self._paused = f"{pending} events wait for their primaries, and most new ones would too"
        else:
            self._paused = None

    def _send_retries(self) -> bool:
        sent = False
        while not self._stopping.is_set() and self._may_retry():
            now_us = self._clock.now_us()
            batch = self._retries.take(now_us, self._settings.batch_events_max)
            if batch is None:
                with self._gate.pacing() as pacing:
                    early = pacing.early(self._clock.monotonic())
                batch = self._retries.take_early(now_us, early) if early else None
            if batch is None:
                break
            sent = True
            with self._gate.pacing() as pacing:
                pacing.taken(len(batch.events))
            self._submit(batch)
        return sent

    def _may_retry(self) -> bool:
        with self._gate.pacing() as pacing:
            return pacing.may_retry(self._clock.monotonic())

    def _submit(self, batch: Batch) -> None:
        if batch.events:
            self._to_send.put(batch)
        else:
            self._answered(batch)
            self._finished.put((batch, _NOTHING_RESOLVED))  # only malformed or blank lines

    def _answered(self, batch: Batch) -> None:
        if isinstance(batch, FreshBatch):
            with self._gate.pacing() as pacing:
                pacing.answered()
            self._wake.set()

    # The sending threads.

    def _send_all(self) -> None:
        while (batch := self._to_send.take()) is not None:
            answer = self._sender.send(batch.events)
            self._answered(batch)
            if answer is None:
                continue  # stopped: it is not recorded, so it is read or taken again at the next start
            resolved = resolve(
                batch.events,
                answer.verdicts,
                answer.reasons,
                self._backoffs,
                answer.at_us,
                self._rng.uniform,
                batch.due_us if isinstance(batch, RetryBatch) and batch.early else None,
            )
            self._finished.put((batch, resolved))

    # The recording thread.

    def _record_all(self) -> None:
        running = True
        while running:
            running, group = self._take_finished()
            if group is not None:
                self._settle(self._recorder.record(group))
                self._learn(group)
                self._wake.set()

    def _take_finished(self) -> tuple[bool, list[Finished] | None]:
        """All that is finished, and what follows shortly; None where nothing is to be recorded. False with
        it if nothing will come any more."""
        item = self._finished.get()
        if item is _Signal.END:
            return False, None
        group: list[Finished] = []
        deadline = self._clock.monotonic() + GATHER_COMMITS_S
        enough = self._settings.batches_in_flight_max
        while item is not _Signal.END:
            if item is not _Signal.FILES_CHANGED:
                group.append(item)
            left = deadline - self._clock.monotonic() if len(group) < enough else 0.0
            try:
                item = self._finished.get(timeout=left) if left > 0 else self._finished.get_nowait()
            except Empty:
                return True, group
        return False, group

    def _settle(self, recorded: list[Batch]) -> None:
        with self._gate.pacing() as pacing:
            for batch in recorded:
                if isinstance(batch, RetryBatch):
                    pacing.retry_recorded(len(batch.events))
                else:
                    pacing.recorded(batch.count, batch.size, self._clock.monotonic())

    def _learn(self, group: list[Finished]) -> None:
        with self._gate.pacing() as pacing:
            for batch, resolved in group:
                again = 0 if resolved.retries is None else len(resolved.retries)
                if isinstance(batch, FreshBatch):
                    pacing.resolved(len(batch.events), again)
                else:
                    pacing.retried(len(batch.events), again, batch.early, self._clock.monotonic())
            self._to_send.in_order = pacing.in_order

    def _wait_for_disk(self, tries: int) -> bool:
        return self._stopping.wait(STORAGE_BACKOFF.delay_s(tries, self._rng.uniform))


class WaitingBatches:
    """Batches that wait for a sender: retries first, fresh ones in order or at random (rules/pacing).

    Filled by one thread, emptied by many. Its user bounds it. None waits for long: only so many are read
    ahead, and reading goes on only as the oldest of them ends.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._changed = threading.Condition()
        self._retries: deque[Batch] = deque()
        self._fresh: list[Batch] = []
        self._closed = False
        self.in_order = True

    def put(self, batch: Batch) -> None:
        with self._changed:
            (self._retries if isinstance(batch, RetryBatch) else self._fresh).append(batch)
            self._changed.notify()

    def take(self) -> Batch | None:
        """The next to send; None when it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._retries or self._fresh or self._closed)
            if self._retries:
                return self._retries.popleft()
            if not self._fresh:
                return None
            return self._fresh.pop(0 if self.in_order else self._rng.randrange(len(self._fresh)))

    def close(self) -> None:
        """Nothing is put any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def backoffs_of(settings: Dispatcher) -> Backoffs:
    least = settings.retry_delay_ms_min * 1_000
    return Backoffs(
        absent=AgeBackoff(least, max(least, settings.absent_delay_ms_max * 1_000)),
        failed=Backoff(settings.retry_delay_ms_min / 1_000, settings.retry_delay_ms_max / 1_000),
    )


# --- Before anything is read: whether the joiners make the same ids of the same events.
#
# Lines that are read by other settings may all be malformed. They would be counted and passed over before any
# batch came to a joiner, which refuses it.

_BACKOFF: Final = Backoff(0.02, 0.25)
_TELL_AFTER_FAILURES: Final = 8  # about 1 s: a joiner that is just starting is not worth a line


def await_agreement(
    agree: Callable[[], None],
    wait: Callable[[float], bool],
    rng: random.Random,
    notice: Callable[[str], None],
) -> bool:
    """Ask until a joiner answers; False if it was time to stop before. SettingsMismatchError if it refuses.

    `agree` is JoinerClient's, `wait` as Sender's.
    """
    failures = 0
    while True:
        try:
            agree()
        except UnavailableError as error:
            failures += 1
            if failures >= _TELL_AFTER_FAILURES:
                notice(f"joiner: {error}; nothing is read until one answers")
            if wait(_BACKOFF.delay_s(failures, rng.uniform)):
                return False
        else:
            return True
