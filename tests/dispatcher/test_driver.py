"""Between the threads of a dispatcher: waiting batches, the gate of requests, recording on failing disks."""

import dataclasses
import errno
import random
import threading

import numpy as np
import pytest

from dispatcher.driver import Driver, Recorder
from dispatcher.ledger import Ledger, RetryQueue
from dispatcher.rules.backlog import LOOK_S, Found, Look
from dispatcher.rules.events import FreshBatch, Resolved, RetryBatch
from dispatcher.rules.pacing import HELD_S_MAX, Pacing
from dispatcher.rules.verdicts import none_joined
from dispatcher.sender import Answer, Gate
from dispatcher.waiting import Hedged, Together, WaitingBatches, Woken
from photon.core.clock import Backoff, ManualClock, SteadyClock
from photon.core.columns import split_ids
from photon.core.errors import DiskFullError, OverloadedError, StorageError, UnavailableError
from photon.core.fates import Fate, Joined, Verdict
from photon.core.settings import Settings
from photon.logs.text import ALL_READ
from photon.logs.writer import DeadLetter
from tests.dispatcher.fakes import clicks, some_events
from tests.dispatcher.test_reader import Reading


class Failing(Ledger):
    """A ledger that can't be written the first `failures` times."""

    failures = 0

    def record(self, entry):
        if self.failures:
            self.failures -= 1
            raise DiskFullError("no space left")
        return super().record(entry)


def joined(count: int) -> Resolved:
    return Resolved({Fate.JOINED: count}, 0, none_joined(), [], None, np.empty(0, np.int64))


class Scene:
    def __init__(self, tmp_path, failures: int, stop: bool) -> None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "a.jsonl").write_bytes(clicks(0, 6))
        self.reading = Reading(tmp_path / "logs", batch_events_max=2)
        self.ledger = Failing(tmp_path / "state", tmp_path / "dead", 1 << 30)
        self.ledger.failures = failures
        self.waits: list[int] = []
        queue = RetryQueue(self.ledger, 1000, 1000)
        self.recorder = Recorder(self.ledger, self.reading.reader, queue, self, lambda _: None)
        self._stop = stop

    def wait(self, _backoff: Backoff, failures: int) -> bool:
        """As the gate's."""
        self.waits.append(failures)
        assert self.recorder.storage_error == "no space left"
        return self._stop

    def record(self) -> list[int]:
        return [
            len(self.recorder.record([(batch, joined(len(batch.events)))])) for batch in self.reading.all()
        ]


def test_a_commit_is_tried_until_the_disk_takes_it(tmp_path):
    scene = Scene(tmp_path, failures=3, stop=False)
    assert scene.record() == [1, 1, 1]
    assert scene.waits == [1, 2, 3]
    assert scene.recorder.storage_error is None
    assert scene.ledger.totals.foreign_events == 6
    scene.ledger.close()


def test_nothing_is_recorded_over_the_gap_that_a_commit_given_up_leaves(tmp_path):
    scene = Scene(tmp_path, failures=1, stop=True)
    assert scene.record() == [0, 0, 0]
    assert scene.ledger.totals.foreign_events == 0
    assert scene.ledger.files() == []
    scene.ledger.close()


def test_dead_letters_that_only_a_restart_can_mend_end_the_process(tmp_path, monkeypatch):
    scene = Scene(tmp_path, failures=0, stop=True)
    (first, *_) = scene.reading.all()
    letter = DeadLetter(Fate.FILTERED, "skipped", b"{}", "a.jsonl", 0)
    filtered = Resolved(
        {Fate.FILTERED: len(first.events)}, 0, none_joined(), [letter], None, np.empty(0, np.int64)
    )

    def lost(_fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("photon.logs.writer.os.fdatasync", lost)
    with pytest.raises(StorageError, match="Input/output"):
        scene.recorder.record([(first, filtered)])
    assert scene.waits == []
    scene.ledger.close()


OLD_US = 1_700_000_000_000_000
NOW_US = OLD_US + 3_600_000_000


def fresh_batch(number, newest_us=0):
    events = some_events(2, first=10 * number)
    times = np.array([newest_us, newest_us - 1], "<i8").tobytes()
    return FreshBatch(number, dataclasses.replace(events, times=times), [], [])


def taken(waiting):
    waiting.close()
    batches = []
    while (one := waiting.take()) is not None:
        batches.append(one.batches if isinstance(one, Together) else one)
    return batches


def test_retries_come_first_and_batches_go_in_the_order_of_the_logs_up_to_a_full_one_together():
    waiting = WaitingBatches(5)
    fresh = [fresh_batch(number) for number in range(5)]
    retries = [RetryBatch([b""] * events, some_events(events)) for events in (7, 1, 4, 1)]
    for batch in (*fresh, *retries):
        waiting.put(batch)
    assert taken(waiting) == [retries[:1], retries[1:3], retries[3:], fresh[:2], fresh[2:4], fresh[4:]]


def test_a_batch_is_held_until_the_event_store_has_read_so_far_and_others_go_first():
    waiting = WaitingBatches(100)
    waiting.read_to(OLD_US)
    late, soon, read, live = (
        fresh_batch(number, newest_us)
        for number, newest_us in enumerate((OLD_US + 200, OLD_US + 100, OLD_US, NOW_US - 1_000_000))
    )
    for batch in (late, soon, read, live):
        waiting.put(batch, 5.0, NOW_US)
    assert waiting.held == 2
    assert waiting.take().batches == [read, live]
    waiting.read_to(OLD_US + 150)
    assert (waiting.take().batches, waiting.held) == ([soon], 1)
    waiting.put(other := fresh_batch(9, OLD_US + 150), 5.0, NOW_US)
    assert waiting.take().batches == [other]
    waiting.read_to(ALL_READ)
    assert (waiting.take().batches, waiting.held) == ([late], 0)


def test_no_batch_is_held_for_long_and_none_is_left_behind():
    waiting = WaitingBatches(100)
    waiting.read_to(0)
    first, second, third = (fresh_batch(number, OLD_US) for number in range(3))
    waiting.put(first, 5.0, NOW_US)
    waiting.put(second, 6.0, NOW_US)
    assert waiting.next_due == 5.0 + HELD_S_MAX
    waiting.release(5.0 + HELD_S_MAX)
    assert (waiting.take().batches, waiting.held, waiting.next_due) == ([first], 1, 6.0 + HELD_S_MAX)
    waiting.put(third, 7.0, NOW_US)
    assert taken(waiting) == [[second, third]]


def hedged(due: float, first: int = 0, events: int = 10) -> Hedged:
    batch = RetryBatch([b""] * events, some_events(events, first=first))
    return Hedged(due, batch, Answer(np.zeros(events, np.uint8), np.zeros(events, np.int64)))


def test_own_events_go_first_and_hedged_ones_when_they_are_released_and_together():
    waiting = WaitingBatches(25)
    early, late = [hedged(1.0), hedged(1.0), hedged(1.0)], hedged(2.0)
    for one in (late, *early):
        waiting.hedge(one)
    assert waiting.next_due == 1.0
    waiting.release(1.5)
    assert waiting.next_due == 2.0
    fresh = fresh_batch(0)
    waiting.put(fresh)
    assert waiting.take().batches == [fresh]
    assert waiting.take() == early[:2], "no more events than a batch has"
    assert waiting.take() == early[2:]
    waiting.close()
    assert waiting.take() == [late], "what is hedged at the end is not left behind"
    waiting.hedge(late)
    assert waiting.take() == [late], "nor what a sender still had in hand"
    assert waiting.take() is None
    assert waiting.next_due == float("inf")


def test_what_is_left_of_a_backlog_waits_for_no_time_but_to_be_found_registered():
    waiting = WaitingBatches(25)
    first, second, live = hedged(1.0), hedged(1.0), hedged(2.0)
    live.answer.verdicts[:] = Verdict.HEDGED
    waiting.release(0.5)
    waiting.hedge(first, old=True)
    waiting.hedge(second, old=True)
    waiting.hedge(live)
    waiting.put(fresh := fresh_batch(0))
    waiting.release(0.5 + LOOK_S)
    assert waiting.take().batches == [fresh], "what is to be sent goes first"
    look = waiting.take()
    assert look.batches == [first, second]
    nothing, all_of_it = (
        Found(np.zeros(2, int), np.array([0, 10])),
        Found(np.array([0, 10]), np.zeros(2, int)),
    )
    assert waiting.looked(look, [all_of_it, nothing]) == [first]
    assert waiting.next_due == 0.5 + 2 * LOOK_S
    waiting.release(0.5 + 2 * LOOK_S)
    assert waiting.take().batches == [second]
    waiting.close()
    assert waiting.take() == [live]
    assert waiting.looked(Look([second]), [nothing]) == []
    assert taken(waiting) == [[second]], "what was being looked for is not left behind"


def woken_while_it_is_looked_for() -> tuple[WaitingBatches, Hedged, Look[Hedged], Woken]:
    """A batch of a backlog, the look that is under way, and what of it is being tried."""
    waiting, one = WaitingBatches(25), absent(1.0, 0)
    waiting.release(0.0)
    waiting.hedge(one, old=True)
    waiting.release(LOOK_S)
    look = waiting.take()
    waiting.arrive(primaries(one, 2))
    return waiting, one, look, waiting.take()


def test_a_batch_of_which_a_try_leaves_some_to_another_datacenter_while_it_is_looked_for_is_not_done():
    waiting, one, look, woken = woken_while_it_is_looked_for()
    one.answer.verdicts[2] = Verdict.HEDGED
    waiting.tried(woken)
    assert waiting.looked(look, [Found(np.array([0, 5]), np.array([0, 0]))]) == []
    assert waiting.take() == [one], "what is left is asked for"


def test_an_own_batch_waits_with_the_backlog_that_is_recorded_before_it():
    waiting = WaitingBatches(25)
    waiting.release(0.0)
    waiting.hedge(old := hedged(1.0), old=True)
    waiting.hedge(live := absent(0.0, 10))
    waiting.release(LOOK_S)
    waiting.arrive(primaries(live, 4))
    woken = waiting.take()
    assert [(one is live, rows.tolist()) for one, rows in woken.parts] == [(True, [4])]
    look = waiting.take()
    assert look.batches == [old, live]


def test_a_batch_that_is_done_waits_for_what_of_it_is_being_tried():
    waiting, one, look, woken = woken_while_it_is_looked_for()
    assert waiting.looked(look, [Found(np.array([0, 5]), np.zeros(2, int))]) == []
    waiting.put(fresh := fresh_batch(0))
    assert waiting.take().batches == [fresh]
    one.answer.verdicts[2] = Joined.JOINED
    waiting.tried(woken)
    assert waiting.take() == [one]


def absent(due: float, first: int) -> Hedged:
    """Of ten events the even ones wait for their primaries."""
    made = hedged(due, first)
    made.answer.verdicts[::2] = Joined.RETRY_ABSENT
    return made


def primaries(batch: Hedged, *rows: int) -> list[bytes]:
    ids = split_ids(batch.batch.events.primary_ids)
    return [ids[row] for row in rows]


def test_hedged_events_are_woken_as_their_primaries_arrive_and_their_batch_waits_for_what_is_tried():
    waiting = WaitingBatches(25)
    first, second = absent(1.0, 0), absent(2.0, 10)
    waiting.arrive(primaries(first, 8))  # before it is known that this waits
    waiting.hedge(first)
    waiting.hedge(second)
    assert waiting.last_due == 2.0
    woken = waiting.take()
    assert [(one is first, rows.tolist()) for one, rows in woken.parts] == [(True, [8])]
    waiting.arrive([*primaries(second, 4, 2, 1), *primaries(first, 0)])
    both = waiting.take()
    assert [(one is first, rows.tolist()) for one, rows in both.parts] == [(False, [2, 4]), (True, [0])]
    waiting.release(1.5)
    waiting.put(fresh := fresh_batch(0))
    first.answer.verdicts[8] = Joined.JOINED
    waiting.tried(woken)
    assert waiting.take().batches == [fresh], "the first is still being tried"
    first.answer.verdicts[0] = second.answer.verdicts[2] = Joined.JOINED
    waiting.tried(both)
    assert waiting.take().parts[0][1].tolist() == [4], "an arrival is remembered once"
    waiting.arrive(primaries(first, 2))
    assert waiting.take().parts[0][1].tolist() == [2]
    first.answer.verdicts[2] = Joined.JOINED
    waiting.tried(Woken([(first, np.array([2]))]))
    assert waiting.take() == [first]
    waiting.arrive(primaries(first, 4, 6))  # the ledger has these now
    waiting.put(fresh)
    assert waiting.take().batches == [fresh]
    waiting.close()
    assert waiting.take() is None, "who tries the rest takes the batch after it"
    waiting.tried(Woken([(second, np.array([4]))]))
    assert taken(waiting) == [[second]]
    assert waiting.woken_events == 6


def gate(senders: int, clock: ManualClock) -> Gate:
    pacing = Pacing(senders, 100, 100)
    return Gate(pacing, SteadyClock(clock), random.Random(1), threading.Event(), print)


def test_the_gate_learns_from_what_becomes_of_requests_and_lets_as_many_in_as_the_window_says():
    clock = ManualClock()
    two = gate(2, clock)
    clock.advance(1.0)
    assert two.enter() and two.enter()
    two.stopping.set()
    assert not two.enter(), "full, and it is time to stop"
    with pytest.raises(OverloadedError), two.request():
        raise OverloadedError("too much")
    assert two.size == 1
    assert not two.enter()
    with pytest.raises(UnavailableError), two.request():
        raise UnavailableError("gone")
    assert two.enter()


def test_a_thread_that_waits_at_the_gate_goes_on_as_another_leaves():
    one = gate(1, ManualClock())
    assert one.enter()
    entered = threading.Event()

    def wait():
        one.enter()
        entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.is_set()
    with one.request():
        pass
    thread.join(10)
    assert entered.is_set()


def test_what_waits_again_is_taken_by_another_sender_at_once_and_ended_by_that_one_alone(tmp_path):
    first, second = hedged(1.0, 0), hedged(1.0, 10)

    class HandsOut:
        """Leaves all hedged; while the second batch is put back, another sender has answers for the first."""

        def send_hedged(self, batches, due) -> None:
            for _, answer in batches:
                answer.verdicts[:] = Joined.JOINED if threading.current_thread() is other else Verdict.HEDGED

        def due(self, events, answer) -> float:
            if answer is second.answer and other.ident is None:
                driver._to_send.release(1.0)
                other.start()
                other.join()
                driver._wake.clear()
            return 1.0

    scene = Scene(tmp_path, 0, False)
    gate = Gate(Pacing(2, 100, 1000), SteadyClock(ManualClock()), random.Random(1), threading.Event(), print)
    driver = Driver(
        Settings(), scene.ledger, scene.reading.reader, HandsOut(), gate, threading.Event(), lambda _: None
    )
    other = threading.Thread(target=lambda: driver._send_hedged(driver._to_send.take()))
    driver._send_hedged([first, second])
    ended = []
    while not driver._finished.empty():
        ended += [batch for batch, _ in driver._finished.get()]
    assert ended == [first.batch]
    assert driver._wake.is_set(), "the reading thread is to release the second when it is due"
