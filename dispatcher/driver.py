"""The threads of the dispatcher: one reads, several send, one records; bounded all the way.

    reader and retry queue -> [batches to send] -> senders -> [finished batches] -> recorder -> ledger

The life of a batch:

state     by            until                                    a kill now means
--------  ------------  ---------------------------------------  ---------------------------------------------
read      reader        a sender takes it, retries first         its lines are read again
taken     retry queue   as read; it was read before              its entries are in the ledger and come again
held      those to send the event store has read so far, or      the same
          back          HELD_S_MAX is over (rules/pacing)
sent      a sender      registry and joiner have answered        the same; what is registered is a duplicate
stuck     the sender    a joiner answers again: it waits whole   the same
hedged    those to send the hedge is over (rules/homes), or, of  the same
                        a backlog, its homes are done with it
                        (rules/backlog), for what other
                        datacenters are to join; a sender takes
                        it once more, and before that what has
                        found no primary event, as that arrives
resolved  the sender    each event has a fate or waits; fresh    the same
                        ones: those before it in their files
                        are resolved, too
recorded  the recorder  its transaction is on disk               it counts; what waits is in the retry queue

A thread of its own hears of arrivals (worker.Listener) and makes the reader look into the retry queue.

A batch is in flight from when it is read until it is recorded, and only so many are: when joiners or the
disk are slow, reading stops.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.checkpoint import Book, Places
from dispatcher.ledger import Entry, Ledger, RetryQueue
from dispatcher.reader import BATCH_BYTES_MAX, LogReader
from dispatcher.rules.backlog import Look
from dispatcher.rules.copies import Copies
from dispatcher.rules.events import (
    NO_EVENTS,
    Batch,
    Events,
    FreshBatch,
    Resolved,
    RetryBatch,
    concat,
    pack_values,
)
from dispatcher.rules.pacing import Pacing, Reading, is_backlog
from dispatcher.rules.verdicts import Backoffs, Totals, none_joined, resolve
from dispatcher.sender import Answer, Gate, Sender
from dispatcher.waiting import Hedged, WaitingBatches, Woken
from photon.core.clock import Backoff
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Differing, Fate
from photon.core.settings import Settings
from photon.logs.files import FileState
from photon.logs.writer import dead_letter_lines

GATHER_COMMITS_S: Final = 0.01
"""Batches that finish within this window share a transaction: idle traffic costs few fsyncs."""

_WAIT_S_MIN: Final = 0.001
_NONE_DUE: Final = np.empty(0, np.int64)
_NOTHING_RESOLVED: Final = Resolved({}, 0, none_joined(), [], None, _NONE_DUE)

STORAGE_BACKOFF: Final = Backoff(0.1, 5.0)

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


class Driver:
    """Runs from `start` to `stop`. `failure`: what ended it before, if anything did."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        reader: LogReader,
        sender: Sender,
        gate: Gate,
        wake: threading.Event,
        recorded: Recorded,
        book: Book | None = None,
    ) -> None:
        """`wake`: set by the reader when logs have grown. `book`: of a share that others may go on with."""
        self._settings = settings.dispatcher
        self._poll_interval_s = settings.logs.poll_interval_ms / 1000
        self._ledger = ledger
        self._reader = reader
        self._sender = sender
        self._gate = gate
        self._clock = gate.clock
        self._stopping = gate.stopping
        self._wake = wake
        self._backoffs = Backoffs.of(self._settings)
        self._retries = RetryQueue(ledger, self._backoffs.delay_us_max, BATCH_BYTES_MAX)
        self._recorder = Recorder(ledger, reader, self._retries, gate, recorded, book)
        senders = self._settings.batches_in_flight_max
        self._to_send = WaitingBatches(self._settings.batch_events_max, senders)
        self._copies = Copies(round(settings.ids.time_spread_max_s * 1e6))
        self._copies_lock = threading.Lock()
        self._finished: SimpleQueue[list[Finished] | None] = SimpleQueue()
        """To the recorder: batches; none where only states of files are to be recorded; None at the end."""
        self.paused: str | None = None
        """Why no new events are read, if it is not that all are."""
        self._caught_up = False
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        """Set on `stop` and on failure."""
        self._senders = [self._thread("send", self._send_all) for _ in range(senders)]
        self._source = self._thread("read", self._read_all)
        self._writer = self._thread("record", self._record_all)

    @property
    def storage_error(self) -> str | None:
        """What keeps the ledger from being written now."""
        return self._recorder.storage_error

    @property
    def in_flight(self) -> int:
        """Events read or taken for a retry, and not recorded."""
        with self._gate.pacing() as pacing:
            return pacing.fresh_events + pacing.retry_events + pacing.hedged_events

    @property
    def woken(self) -> int:
        """Events tried again because their primary events had arrived."""
        return self._retries.woken_events + self._to_send.woken_events

    def arrive(self, primary_ids: Sequence[bytes]) -> None:
        """Try those events at once that wait for these. From any thread."""
        self._to_send.arrive(primary_ids)
        if self._retries.arrive(primary_ids):
            self._wake.set()

    def read_to(self, time_us: int) -> None:
        """About up to this time the event store has read all primary logs. From any thread."""
        self._to_send.read_to(time_us)
        self._wake.set()

    @property
    def idle(self) -> bool:
        """All whole lines that are there are read, and each event has its fate, on disk."""
        with self._gate.pacing() as pacing:
            at_work = pacing.fresh_batches or pacing.retry_batches or pacing.hedged_events
            at_rest = self._caught_up and not at_work
        return at_rest and not self._ledger.pending

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
        if not self._sender.agree():
            return
        has_time = False
        while not self._stopping.is_set():
            self._wake.clear()
            if self._reader.look():
                self._finished.put([])
            with self._gate.pacing() as pacing:
                has_room = pacing.has_room_to_hedge
            self._to_send.release(self._clock.monotonic(), has_room, has_time)
            sent = self._send_woken()
            sent = self._send_retries() or sent
            has_time = not self._send_fresh()
            sent = sent or not has_time
            lingers_s = self._reader.looks_at - self._clock.monotonic()
            if not sent and lingers_s > 0:
                self._stopping.wait(lingers_s)  # whatever wakes it meanwhile: all that goes together
            elif not sent:
                self._wake.wait(self._wait_s())

    def _wait_s(self) -> float:
        due_us = self._retries.next_due_us
        longest_s = self._reader.follower.patience_s if self._caught_up else self._poll_interval_s
        now = self._clock.monotonic()
        longest_s = max(_WAIT_S_MIN, min(longest_s, self._to_send.next_due - now))
        with self._gate.pacing() as pacing:
            pause_s = pacing.wait_s(now)
        if due_us is None or pause_s is None:
            return longest_s
        wait_s = max(pause_s, (due_us - self._clock.now_us()) / 1e6)
        return max(_WAIT_S_MIN, min(longest_s, wait_s))

    def _send_fresh(self) -> bool:
        """One batch, so that a long backlog keeps neither retries nor new files waiting."""
        batch = self._reader.next_batch() if (may_read := self._may_read()) else None
        if batch is None:
            self._caught_up = may_read and self._reader.caught_up
            return False
        self._caught_up = False
        with self._gate.pacing() as pacing:
            pacing.read(batch.count, batch.size, self._clock.monotonic())
        if batch.events:
            self._to_send.put(batch, self._clock.monotonic(), self._clock.wall.now_us())
        else:
            self._finish(batch, _NOTHING_RESOLVED)  # only malformed or blank lines
        return True

    def _may_read(self) -> bool:
        pending = self._ledger.pending
        with self._gate.pacing() as pacing:
            may = pacing.may_read(
                pending,
                self._clock.monotonic(),
                self._to_send.held,
                self._ledger.full,
                self._to_send.all_read,
            )
        if may is Reading.FULL:
            bound = self._settings.state_bytes_max
            # Without the present number: a notice that says the same is told once.
            self._gate.notice(
                f"events that wait for their primary events fill the ledger ('dispatcher.state_bytes_max' is "
                f"{bound}): no new ones are read until some have joined; see whether their primaries are "
                "read, or set more"
            )
            self.paused = f"{pending} events wait and fill the ledger, 'state_bytes_max' is {bound}"
        elif may is Reading.BEHIND:
            self.paused = f"{pending} events wait for their primaries, and most new ones would too"
        elif may is Reading.READ:
            self.paused = None
        return may is Reading.READ

    def _send_woken(self) -> bool:
        with self._gate.pacing() as pacing:
            may = pacing.may_wake()
        batch = self._retries.take_woken(self._settings.batch_events_max) if may else None
        if batch is None:
            return False
        self._send_again(batch)
        return True

    def _send_again(self, batch: RetryBatch) -> None:
        with self._gate.pacing() as pacing:
            pacing.taken(len(batch.events), batch.woken)
        self._to_send.put(batch)

    def _send_retries(self) -> bool:
        sent = False
        while not self._stopping.is_set():
            now_us, now = self._clock.now_us(), self._clock.monotonic()
            with self._gate.pacing() as pacing:
                if not pacing.may_retry(now):
                    break
            batch = self._retries.take(now_us, self._settings.batch_events_max)
            if batch is None:
                with self._gate.pacing() as pacing:
                    early = pacing.early(now)
                batch = self._retries.take(now_us, early, early=True) if early else None
            if batch is None:
                break
            sent = True
            self._send_again(batch)
        return sent

    # The sending threads.

    def _send_all(self) -> None:
        while taken := self._to_send.take():
            if isinstance(taken, list):
                self._send_hedged(taken)
            elif isinstance(taken, Woken):
                self._sender.send_again([(one.batch.events, one.answer, rows) for one, rows in taken.parts])
                self._to_send.tried(taken)
            elif isinstance(taken, Look):
                self._look(taken)
            else:
                self._send(taken.batches)

    def _send(self, batches: Sequence[Batch]) -> None:
        """In one request."""
        answer = self._sender.send(concat([batch.events for batch in batches]))
        answers = repeat(None) if answer is None else answer.split([len(batch.events) for batch in batches])
        for batch, one in zip(batches, answers, strict=False):
            if one is None:
                self._finish(batch, None)
            elif len(one.hedged):
                self._hedge(batch, one, self._sender.due(batch.events, one))
            elif (due := self._turn(batch, one)) is not None:
                self._hedge(batch, one, due)
            else:
                self._finish(batch, self._resolved(batch, one))

    def _send_hedged(self, taken: list[Hedged]) -> None:
        self._sender.send_hedged([(one.batch.events, one.answer) for one in taken], taken[-1].due)
        # Now: as soon as one waits again another sender may take it, and finish it.
        done = [one for one in taken if not len(one.answer.hedged)]
        for one in [one for one in taken if len(one.answer.hedged)]:
            due = self._sender.due(one.batch.events, one.answer)
            self._to_send.hedge(Hedged(due, one.batch, one.answer))
        self._finish_hedged(done)

    def _resolved(self, batch: Batch, answer: Answer, hedged: bool = False) -> Resolved:
        with self._copies_lock:
            differing = self._copies.differing(batch.events, answer.verdicts)
        resolved = resolve(
            batch.events,
            answer.verdicts,
            answer.reasons,
            self._backoffs,
            answer.at_us,
            self._gate.rng.uniform,
            batch.due_us if isinstance(batch, RetryBatch) and batch.early else None,
            self._clock.set_by_us,
            differing,
        )
        return dataclasses.replace(resolved, hedged=True) if hedged else resolved

    def _turn(self, batch: Batch, answer: Answer) -> float | None:
        """Until when it waits for hedged ones, which are recorded before it; None unless that keeps some of
        its events from being woken."""
        return self._to_send.last_due if isinstance(batch, FreshBatch) and len(answer.absent) else None

    def _hedge(self, batch: Batch, answer: Answer, due: float) -> None:
        """Under way no more, so that others are read and sent meanwhile."""
        with self._gate.pacing() as pacing:
            pacing.hedged(len(batch.events), batch.size)
            self._leave(pacing, batch)
            if isinstance(batch, FreshBatch):
                pacing.answered()
        old = isinstance(batch, FreshBatch) and is_backlog(batch.events.newest_us, self._clock.wall.now_us())
        self._to_send.hedge(Hedged(due, batch, answer), old and not self._sender.passes_over)
        self._wake.set()

    def _look(self, look: Look[Hedged]) -> None:
        parts = [(one.batch.events, one.answer) for one in look.batches]
        self._finish_hedged(self._to_send.looked(look, self._sender.look(parts, look.joins, look.missed)))

    def _finish_hedged(self, done: list[Hedged]) -> None:
        if done:
            self._finished.put([(one.batch, self._resolved(one.batch, one.answer, True)) for one in done])
        self._wake.set()

    def _finish(self, batch: Batch, resolved: Resolved | None) -> None:
        """`resolved`: None where it was stopped. It is not recorded, so it comes again at the next start."""
        if isinstance(batch, FreshBatch):
            with self._gate.pacing() as pacing:
                pacing.answered()
            self._wake.set()
        if resolved is not None:
            self._finished.put([(batch, resolved)])

    def _leave(self, pacing: Pacing, batch: Batch) -> None:
        """It is not under way any more."""
        if isinstance(batch, RetryBatch):
            pacing.retry_recorded(len(batch.events), batch.woken)
        else:
            pacing.recorded(batch.count, batch.size, self._clock.monotonic())

    # The recording thread.

    def _record_all(self) -> None:
        ended = False
        while not ended:
            item, group = self._finished.get(), list[Finished]()
            deadline = self._clock.monotonic() + GATHER_COMMITS_S
            while item is not None:
                group += item
                enough = len(group) >= self._settings.batches_in_flight_max
                left = 0.0 if enough else deadline - self._clock.monotonic()
                try:
                    item = self._finished.get(timeout=left) if left > 0 else self._finished.get_nowait()
                except Empty:
                    break
            else:
                ended = True
            self._learn(group, self._recorder.record(group))
            self._wake.set()

    def _learn(self, group: list[Finished], recorded: Sequence[Finished]) -> None:
        now = self._clock.monotonic()
        with self._gate.pacing() as pacing:
            for batch, resolved in recorded:
                if resolved.hedged:
                    pacing.hedged_recorded(len(batch.events), batch.size)
                else:
                    self._leave(pacing, batch)
            for batch, resolved in group:
                again = 0 if resolved.retries is None else len(resolved.retries)
                if isinstance(batch, FreshBatch):
                    pacing.resolved(len(batch.events), again)
                elif not batch.woken:  # those tell nothing of others
                    pacing.retried(len(batch.events), again, batch.early, now)
