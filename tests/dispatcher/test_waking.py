"""Events that wait are tried again as soon as their primary events arrive (paper 3.2.1)."""

import threading
import time
from queue import SimpleQueue

import pytest

from dispatcher.rules.awaited import Awaited
from dispatcher.rules.events import Events, due_us_of
from dispatcher.rules.pacing import Pacing
from photon.core.errors import UnavailableError
from photon.core.fates import Fate, Joined
from photon.core.ids import IdPacker
from photon.logs.text import ALL_READ
from tests.dispatcher.fakes import adds_up, click_number, clicks, fast_settings, some_events
from tests.dispatcher.test_retries import Queue, numbers
from tests.waiting import wait_until

PACKER = IdPacker()
MINUTE_MS = 60_000


def keys(low, high):
    return [b"k%015d" % number for number in range(low, high)]


def primaries(low, high):
    return [b"p%015d" % number for number in range(low, high)]


def test_an_arrival_wakes_all_events_that_wait_for_it_and_no_other():
    awaited = Awaited()
    assert awaited.add(keys(0, 4), [*primaries(0, 3), *primaries(0, 1)]) == []
    assert sorted(awaited.arrive([*primaries(0, 2), *primaries(9, 10)])) == [*keys(0, 2), *keys(3, 4)]
    assert awaited.arrive(primaries(0, 2)) == []
    assert awaited.arrive(primaries(2, 3)) == keys(2, 3)


def test_an_arrival_before_the_retry_is_recorded_wakes_it_once():
    awaited = Awaited()
    awaited.arrive(primaries(0, 1))
    assert awaited.add(keys(0, 3), primaries(0, 1) * 2 + primaries(1, 2)) == keys(0, 2)
    assert awaited.add(keys(0, 2), primaries(0, 1) * 2) == []  # tried once more, in vain
    assert sorted(awaited.arrive(primaries(0, 1))) == keys(0, 2)


def test_what_has_ended_wakes_no_more():
    awaited = Awaited()
    awaited.add(keys(0, 4), primaries(0, 1) * 3 + primaries(1, 2))
    awaited.drop(keys(0, 1)[0], primaries(0, 1)[0])
    awaited.drop(keys(3, 4)[0], primaries(1, 2)[0])
    assert sorted(awaited.arrive(primaries(0, 2))) == keys(1, 3)


def test_of_too_many_the_newest_are_known():
    awaited = Awaited(awaited_max=20, arrived_max=20)
    for number in range(100):
        awaited.add(keys(number, number + 1), primaries(number, number + 1))
    woken = awaited.arrive(primaries(0, 100))
    assert 10 <= len(woken) <= 20 and sorted(woken) == keys(100 - len(woken), 100)
    # Of the arrivals, too.
    assert awaited.add(keys(0, 100), primaries(0, 100)) == keys(90, 100)


def test_events_that_are_tried_again_and_again_push_out_none_that_waits_longer():
    awaited = Awaited(awaited_max=20)
    awaited.add(keys(0, 5), primaries(0, 5))
    for number in range(10, 100):
        awaited.add(keys(number, number + 1), primaries(10, 11))
        awaited.add(keys(number + 100, number + 101), primaries(10, 11))
        awaited.drop(keys(number, number + 1)[0], primaries(10, 11)[0])
        assert awaited.arrive(primaries(10, 11)) == keys(number + 100, number + 101)
        awaited.add(keys(number, number + 1), primaries(10, 11))  # it remembers that arrival once
    assert sorted(awaited.arrive(primaries(0, 5))) == keys(0, 5)


@pytest.fixture
def queue(tmp_path):
    queue = Queue(tmp_path)
    yield queue
    queue.ledger.close()


def primary_id(number):
    """As some_events has it."""
    return number.to_bytes(16, "big")[::-1]


def test_a_woken_event_is_taken_before_its_time_and_once(queue):
    queue.add(some_events(4), 900_000)
    assert queue.queue.take_woken(10) is None
    assert not queue.queue.arrive([primary_id(7)])
    assert queue.queue.arrive([primary_id(2), primary_id(0), primary_id(2)])
    batch = queue.queue.take_woken(10)
    assert (sorted(numbers(batch)), batch.early, batch.woken) == ([0, 2], True, True)
    assert queue.queue.take_woken(10) is None
    assert numbers(queue.queue.take(900_000, 10)) == [1, 3]
    queue.joined(batch)
    assert queue.queue.woken_events == 2


def test_an_arrival_while_the_event_is_tried_wakes_it_afterwards(queue):
    queue.add(some_events(2), 1_000)
    tried = queue.queue.take(1_000, 10)
    queue.queue.arrive([primary_id(1)])
    assert queue.queue.take_woken(10) is None  # it is in flight
    queue.add(tried.events, 900_000, removed=tried.keys)
    assert numbers(queue.queue.take_woken(10)) == [1]


def test_an_arrival_before_the_ledger_has_the_retry_wakes_it(queue):
    queue.queue.arrive([primary_id(1)])
    queue.add(some_events(2), 900_000)
    assert numbers(queue.queue.take_woken(10)) == [1]


def test_woken_batches_are_bounded_by_events_and_by_bytes(queue):
    big = some_events(5)
    big.lines[:] = [line[:-1] + b" " * 600_000 + b"}" for line in big.lines]
    queue.add(big, 900_000)
    queue.queue.arrive([primary_id(number) for number in range(5)])
    assert [numbers(queue.queue.take_woken(most)) for most in (1, 10, 10, 10)] == [[0], [1, 2], [3, 4], []]


def test_an_event_that_was_woken_and_has_ended_otherwise_is_passed_over(queue):
    queue.add(some_events(2), 1_000)
    queue.queue.arrive([primary_id(0), primary_id(1)])
    queue.joined(queue.queue.take(1_000, 1))
    assert numbers(queue.queue.take_woken(10)) == [1]


def test_woken_retries_do_not_wait_for_due_ones_nor_for_what_those_cost():
    pacing = Pacing(senders=3, events_max=100, bytes_max=1 << 20)
    pacing.taken(10)
    pacing.retried(1_000_000, 1_000_000, False, 0.0)
    assert pacing.wait_s(0.0) is None and pacing.may_wake()
    for _ in range(3):
        pacing.taken(1, woken=True)
    assert not pacing.may_wake()
    pacing.retry_recorded(10)
    assert pacing.may_retry(1e6)  # nor due ones for woken ones
    pacing.retry_recorded(1, woken=True)
    assert pacing.may_wake()


class FakeEventStore:
    """Gives what it is told, or raises it; `close` ends the call."""

    def __init__(self):
        self.calls = []
        self.read_to_us = ALL_READ
        self.closed = False
        self._answers = SimpleQueue()

    def arrives(self, *numbers):
        self._answers.put(PACKER.pack([f"query-{number}" for number in numbers]))

    def fails(self):
        self._answers.put(UnavailableError("away"))

    def has_read_to(self, time_us):
        self.read_to_us = time_us
        self._answers.put(b"")

    addresses = ("store",)

    def keep_up(self):
        pass

    def arrivals(self, address, after, read_to_us):
        self.calls.append(after)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return after + 1, self.read_to_us, answer

    def close(self):
        self.closed = True
        self.fails()


class Late:
    """A site whose primary events arrive one by one; backoff alone would take a minute."""

    def __init__(self, site, running, **placed):
        self.site = site
        self.eventstore = FakeEventStore()
        self.there = set()
        self.missed = lambda _number: None
        site.joiner.answer = self.answer
        minute = {"retry_delay_ms_min": MINUTE_MS, "retry_delay_ms_max": MINUTE_MS}
        settings = fast_settings(**minute, home_hedge_ms=MINUTE_MS)
        self.server = running(settings, eventstore=self.eventstore, **placed)

    def answer(self, line, _tries):
        number = click_number(line)
        if number in self.there:
            return Joined.JOINED, None
        self.missed(number)
        return Joined.RETRY_ABSENT, None

    def click(self, low, high):
        (self.site.logs / f"{low}.jsonl").write_bytes(clicks(low, high))

    def arrive(self, *numbers):
        self.there.update(numbers)
        self.eventstore.arrives(*numbers)

    def await_joined(self, count):
        wait_until(lambda: self.server.status()["fates"][Fate.JOINED] == count)


@pytest.fixture
def late(site, running):
    return Late(site, running)


def test_a_click_is_joined_when_its_query_arrives_not_when_its_backoff_ends(late):
    late.click(0, 10)
    wait_until(lambda: late.server.status()["pending"] == 10)
    late.arrive(3, 5)
    late.await_joined(2)
    status = late.server.status()
    assert (status["woken"], status["pending"], adds_up(status)) == (2, 8, True)
    assert sorted(late.site.joiner.handed.values()) == [1] * 8 + [2] * 2


def test_old_clicks_are_sent_when_the_event_store_has_read_the_logs_as_far_as_they_are(late):
    """Catching up, clicks are read faster than queries: each would be sent in vain, put by and sent again."""
    newest_us = Events.newest_us.fget(some_events(10))
    late.eventstore.has_read_to(newest_us - 1)
    wait_until(lambda: len(late.eventstore.calls) > 1)
    late.there.update(range(10))
    late.click(0, 10)
    wait_until(lambda: late.server.status()["in_flight"] == 10)
    assert not late.site.joiner.handed
    late.eventstore.has_read_to(newest_us)
    late.await_joined(10)
    assert set(late.site.joiner.handed.values()) == {1}


def test_a_query_that_arrives_while_its_click_is_at_the_joiner_is_not_missed(late):
    def arrives(number):
        late.missed = lambda _number: None
        late.arrive(number)
        wait_until(lambda: len(late.eventstore.calls) > 1)  # the dispatcher has heard of it

    late.missed = arrives
    late.click(0, 1)
    late.await_joined(1)
    assert late.server.status()["woken"] == 1


def test_the_dispatcher_goes_on_hearing_after_the_event_store_was_away(late):
    late.click(0, 2)
    wait_until(lambda: late.server.status()["pending"] == 2)
    late.eventstore.fails()
    late.eventstore.fails()
    late.arrive(0)
    late.await_joined(1)
    assert late.eventstore.calls[:3] == [0, 0, 0]
    late.arrive(1)
    late.await_joined(2)


def test_an_event_woken_too_early_waits_on_as_if_it_had_not_been_tried(late):
    late.click(0, 1)
    wait_until(lambda: late.server.status()["pending"] == 1)
    (before,) = _waiting(late)
    late.eventstore.arrives(0)
    wait_until(lambda: late.server.status()["woken"] >= 1 and not late.server.status()["in_flight"])
    (after,) = _waiting(late)
    assert (after["due_us"], after["tries"]) == (before["due_us"], before["tries"])
    late.arrive(0)
    late.await_joined(1)


JOINERS = {"10.0.0.1:7": "east", "10.0.0.2:7": "west"}


def test_a_click_is_woken_while_others_of_its_batch_or_of_those_before_wait_for_their_home(
    site, running, monkeypatch
):
    """The ledger has none of them before the hedge is over: of 60 s here."""
    monkeypatch.setattr("dispatcher.rules.homes.HEDGE_S_START", 60.0)
    monkeypatch.setattr("dispatcher.rules.pacing.LIVE_S", 1e12)  # no event is old
    site.registry.holders = list(JOINERS)
    late = Late(site, running, datacenter="east", joiners=JOINERS)
    late.click(0, 40)
    wait_until(lambda: late.server.status()["in_flight"] == 40 and site.joiner.handed)
    own = {click_number(line) for line in site.joiner.handed}
    assert 5 < len(own) < 35
    first, second, *rest = sorted(own)
    late.arrive(first, *rest)
    wait_until(lambda: len(site.joiner.joined) == len(own) - 1)
    late.eventstore.arrives(second)  # and is not found all the same
    wait_until(lambda: max(site.joiner.handed.values()) == 3)  # an arrival is remembered once
    late.arrive(second)
    wait_until(lambda: len(site.joiner.joined) == len(own))
    number = 40  # whole batches of this one's own
    while len(site.joiner.handed) < len(own) + 2:
        late.click(number, number + 1)
        number += 1
        wait_until(lambda: late.server.status()["in_flight"] == number)
    # One that was in flight, and not handed yet, when the last click was written makes it three.
    new = {click_number(line) for line in site.joiner.handed} - own
    late.arrive(*new)
    joined = len(own) + len(new)
    wait_until(lambda: len(site.joiner.joined) == joined)
    status = late.server.status()
    assert (status["woken"], status["pending"], status["in_flight"]) == (joined + 2, 0, number)
    late.server.stop()  # what waited for its home is tried, in vain
    status = late.server.status()
    assert (status["fates"][Fate.JOINED], status["pending"]) == (joined, number - joined)
    assert adds_up(status)


def _waiting(late):
    ledger = late.server._worker.ledger
    found = [*ledger.waiting()]
    return [ledger._described(key, value) | {"due_us": due_us_of(key)} for key, value in found]


def test_stopping_ends_the_call_that_waits_for_arrivals(late):
    wait_until(lambda: late.eventstore.calls)
    began = time.monotonic()
    late.server.stop()
    assert late.eventstore.closed and time.monotonic() - began < 30.0
    assert not [thread for thread in threading.enumerate() if thread.name == "dispatcher-arrivals"]
