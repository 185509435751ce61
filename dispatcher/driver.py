"""The threads of the dispatcher: one reads, several send, one records; bounded all the way.

    reader and retry queue -> [batches to send] -> senders -> [finished batches] -> recorder -> ledger

A batch is in flight from when it is read until it is recorded, and only so many are: when joiners or the disk
are slow, reading stops. A kill at any moment only means that what was not recorded is read and sent again,
which the registry makes harmless.
"""

import random
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np

from dispatcher.ledger import Ledger
from dispatcher.reader import LogReader
from dispatcher.recorder import STORAGE_BACKOFF, Finished, Recorder
from dispatcher.retries import RetryQueue
from dispatcher.rules.backoff import AgeBackoff, Backoff, Backoffs
from dispatcher.rules.batches import Batch, FreshBatch, Resolved, RetryBatch
from dispatcher.rules.early import EarlyRetries
from dispatcher.rules.events import NO_EVENTS
from dispatcher.rules.read_ahead import ReadAhead
from dispatcher.rules.throttle import Throttle
from dispatcher.rules.verdicts import resolve
from dispatcher.sender import Sender
from dispatcher.waiting_batches import WaitingBatches
from photon.core.clock import Clock
from photon.core.histogram import no_latencies
from photon.core.settings import Dispatcher
from photon.logs.files import FileState

GATHER_COMMITS_S: Final = 0.01
"""What finishes within so long is one transaction: idle traffic costs few fsyncs."""


_WAIT_S_MIN: Final = 0.001
_NOTHING_RESOLVED: Final = Resolved({}, 0, no_latencies(), [], None, np.empty(0, np.int64))
_FILES_CHANGED: Final = (RetryBatch([], NO_EVENTS), _NOTHING_RESOLVED)
"""Wakes the recorder when there are only states of files to record."""


class Driver:
    """Runs from `start` to `stop`. `failure`: what ended it before, if anything did."""

    def __init__(
        self,
        settings: Dispatcher,
        poll_interval_s: float,
        chunk_bytes: int,
        ledger: Ledger,
        reader: LogReader,
        retries: RetryQueue,
        make_sender: Callable[[Callable[[float], bool]], Sender],
        clock: Clock,
        rng: random.Random,
        notice: Callable[[str], None] = lambda _: None,
        recorded: Callable[[Sequence[FileState]], None] = lambda _: None,
        may_begin: Callable[[Callable[[float], bool]], bool] = lambda _: True,
    ) -> None:
        """`make_sender` is given the wait of Sender's; `recorded` as Recorder's.

        `may_begin`: asked before anything is read, given the same wait; False when it is time to stop.
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
        self._stopping = threading.Event()
        self._wake = threading.Event()
        reader.ring(self._wake.set)
        self._sender = make_sender(self._stopping.wait)
        self._recorder = Recorder(ledger, reader, retries, self._wait_for_disk, recorded)
        self._backoffs = backoffs_of(settings)
        self._to_send = WaitingBatches(rng)
        self._finished: SimpleQueue[Finished | None] = SimpleQueue()
        self._mutex = threading.Lock()  # over the throttle and the counts below
        self._throttle = Throttle(settings.retry_queue_events_max)
        self._ahead = ReadAhead(settings.batches_in_flight_max, settings.batch_events_max, chunk_bytes)
        self._retry_batches = self._retry_events = 0
        self._early_retries = EarlyRetries(settings.batch_events_max)
        self._paused: str | None = None
        self._retry_batches_max = max(1, settings.batches_in_flight_max // 2)
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
        with self._mutex:
            return self._ahead.events + self._retry_events

    @property
    def paused(self) -> str | None:
        """Why no new events are read, if it is not that all are."""
        return self._paused

    @property
    def at_rest(self) -> bool:
        """All whole lines that are there are read, and what became of them is on disk."""
        with self._mutex:
            return self._caught_up and not self._ahead.batches and not self._retry_batches

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
        self._finished.put(None)
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
        if not self._may_begin(self._stopping.wait):
            return
        while not self._stopping.is_set():
            self._wake.clear()
            if self._reader.look():
                self._finished.put(_FILES_CHANGED)
            sent = self._send_retries()
            sent = self._send_fresh() or sent
            if not sent:
                self._wake.wait(self._wait_s())

    def _wait_s(self) -> float:
        due_us = self._retries.next_due_us()
        longest_s = self._reader.patience_s if self._caught_up else self._poll_interval_s
        if due_us is None or self._retry_batches >= self._retry_batches_max:
            return longest_s
        with self._mutex:
            pause_s = self._throttle.retry_wait(self._clock.monotonic())
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
        with self._mutex:
            self._ahead.sent(batch.count, batch.size, self._clock.monotonic())
        self._submit(batch)
        return True

    def _may_read(self) -> bool:
        with self._mutex:
            now = self._clock.monotonic()
            if not self._ahead.room(now):
                return False
            pending = self._ledger.pending
            room = self._throttle.room(pending, self._ahead.events, now)
            self._tell_pause(room, pending)
            if room is not None and room > 0:
                self._throttle.probed(now)
            return room is None or room > 0

    def _tell_pause(self, room: int | None, pending: int) -> None:
        if room != 0:
            self._paused = None
        elif self._throttle.full(pending, self._ahead.events):
            bound = self._settings.retry_queue_events_max
            # Without the present number: a notice that says the same is told once.
            self._notice(
                f"as many events wait for a retry as 'dispatcher.retry_queue_events_max' ({bound}) allows: "
                "no new ones are read until some of them have joined; see whether their primaries are read"
            )
            self._paused = f"{pending} events wait for their retry, 'retry_queue_events_max' is {bound}"
        else:
            self._paused = f"{pending} events wait for their primaries, and most new ones would too"

    def _send_retries(self) -> bool:
        sent = False
        while not self._stopping.is_set() and self._may_retry():
            now_us = self._clock.now_us()
            batch = self._retries.take(now_us, self._settings.batch_events_max)
            if batch is None:
                with self._mutex:
                    early = self._early_retries.take(self._clock.monotonic())
                batch = self._retries.take_early(now_us, early) if early else None
            if batch is None:
                break
            sent = True
            with self._mutex:
                self._retry_batches += 1
                self._retry_events += len(batch.events)
            self._submit(batch)
        return sent

    def _may_retry(self) -> bool:
        with self._mutex:
            if self._retry_batches >= self._retry_batches_max:
                return False
            return self._throttle.retry_wait(self._clock.monotonic()) <= 0

    def _submit(self, batch: Batch) -> None:
        if batch.events:
            self._to_send.put(batch)
        else:
            self._answered(batch)
            self._finished.put((batch, _NOTHING_RESOLVED))  # only malformed or blank lines

    def _answered(self, batch: Batch) -> None:
        if isinstance(batch, FreshBatch):
            with self._mutex:
                self._ahead.answered()
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
                self._rng,
                batch.due_us if isinstance(batch, RetryBatch) and batch.early else None,
            )
            self._finished.put((batch, resolved))

    # The recording thread.

    def _record_all(self) -> None:
        running = True
        while running:
            running, group = self._take_finished()
            if group:
                self._settle(self._recorder.record(group))
                self._learn(group)
                self._wake.set()

    def _take_finished(self) -> tuple[bool, list[Finished]]:
        """All that is finished, and what follows shortly. False with it if nothing will come any more."""
        item = self._finished.get()
        group: list[Finished] = []
        deadline = self._clock.monotonic() + GATHER_COMMITS_S
        enough = self._settings.batches_in_flight_max
        while item is not None:
            group.append(item)
            left = deadline - self._clock.monotonic() if len(group) < enough else 0.0
            try:
                item = self._finished.get(timeout=left) if left > 0 else self._finished.get_nowait()
            except Empty:
                return True, group
        return False, group

    def _settle(self, recorded: list[Batch]) -> None:
        with self._mutex:
            for batch in recorded:
                if batch is _FILES_CHANGED[0]:
                    continue
                if isinstance(batch, RetryBatch):
                    self._retry_batches -= 1
                    self._retry_events -= len(batch.events)
                else:
                    self._ahead.recorded(batch.count, batch.size, self._clock.monotonic())

    def _learn(self, group: list[Finished]) -> None:
        with self._mutex:
            for batch, resolved in group:
                again = 0 if resolved.retries is None else len(resolved.retries)
                if isinstance(batch, FreshBatch):
                    self._throttle.observe(len(batch.events), again)
                    continue
                now = self._clock.monotonic()
                self._throttle.observe_retry(again, now)
                if batch.events:
                    self._early_retries.observe(len(batch.events), again, batch.early, now)
            self._to_send.in_order = self._throttle.ahead_of_primaries

    def _wait_for_disk(self, tries: int) -> bool:
        return self._stopping.wait(STORAGE_BACKOFF.delay_us(tries, self._rng) / 1e6)


def backoffs_of(settings: Dispatcher) -> Backoffs:
    least = settings.retry_delay_ms_min * 1_000
    return Backoffs(
        absent=AgeBackoff(least, max(least, settings.absent_delay_ms_max * 1_000)),
        failed=Backoff(least, settings.retry_delay_ms_max * 1_000),
    )
