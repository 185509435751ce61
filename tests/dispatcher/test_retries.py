"""The queue of events that wait for their retry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.ledger import GATHER_US, Entry, Ledger, RetryQueue
from dispatcher.rules.events import due_us_of, pack_keys, pack_values, unpack_values
from dispatcher.rules.verdicts import Totals
from photon.core.fates import Fate
from photon.core.status import BUCKETS
from tests.dispatcher.fakes import click_number, some_events

MANY_BYTES = 1 << 20
DELAY_US_MAX = 1_000_000


class Queue:
    """A retry queue over a real ledger, and the recording of what becomes of its events."""

    def __init__(self, tmp_path) -> None:
        self._path = tmp_path
        self.reopen()

    def reopen(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        self.ledger = Ledger(self._path / "state", self._path / "dead", 1 << 30)
        self.queue = RetryQueue(self.ledger, DELAY_US_MAX, MANY_BYTES)

    def add(self, events, due_us, removed=()) -> None:
        due = np.full(len(events), due_us) if isinstance(due_us, int) else np.array(due_us)
        fresh = 0 if removed else len(events)
        added = Totals(fresh, {}, 0, [0] * BUCKETS)
        values = pack_values(events)
        keys = self.ledger.record(Entry([], added, b"", removed, due, values))
        self.queue.settled(removed, keys, values)

    def joined(self, batch) -> None:
        self.ledger.record(
            Entry([], Totals(0, {Fate.JOINED: len(batch.keys)}, 0, [0] * BUCKETS), b"", batch.keys)
        )
        self.queue.settled(batch.keys, [], [])


@pytest.fixture
def queue(tmp_path):
    queue = Queue(tmp_path)
    yield queue
    queue.ledger.close()


def numbers(batch) -> list[int]:
    return [click_number(line) for line in batch.events.lines] if batch else []


@given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_an_entry_comes_back_as_it_was_written(count, names, tries):
    events = some_events(count, tries, names)
    back = unpack_values(pack_values(events))
    for column in ("ids", "primary_ids", "times", "lines"):
        assert getattr(back, column) == getattr(events, column)
    for column in ("tries", "sends", "first_seen", "offsets"):
        assert getattr(back, column).tolist() == getattr(events, column).tolist()
    assert [back.name(row) for row in range(count)] == [events.name(row) for row in range(count)]


@given(st.lists(st.integers(0, 2**62), min_size=1), st.integers(0, 2**62))
def test_keys_sort_by_due_time_and_then_by_sequence(due, sequence):
    keys = pack_keys(np.array(due), sequence)
    assert [due_us_of(key) for key in keys] == due
    assert sorted(keys) == [keys[row] for row in np.argsort(due, kind="stable")]


def test_what_is_due_comes_soonest_first_and_nothing_before_its_time(queue):
    queue.add(some_events(4), [400_000, 100_000, 300_000, 200_000])
    assert queue.queue.next_due_us <= 100_000
    assert queue.queue.take(100_000 - GATHER_US - 1, 10) is None
    assert queue.queue.next_due_us == 100_000
    batch = queue.queue.take(300_000, 10)
    assert numbers(batch) == [1, 3, 2]
    assert queue.queue.take(300_000, 10) is None
    assert queue.queue.next_due_us == 400_000
    assert numbers(queue.queue.take(400_000, 10)) == [0]
    assert queue.queue.take(10**9, 10) is None
    assert queue.queue.next_due_us is None


def test_an_event_in_flight_is_not_sent_twice_and_comes_again_after_a_crash(queue):
    queue.add(some_events(5), 1_000)
    first = queue.queue.take(1_000, 3)
    second = queue.queue.take(1_000, 3)
    assert (numbers(first), numbers(second)) == ([0, 1, 2], [3, 4])
    assert queue.queue.take(1_000, 3) is None
    queue.joined(first)
    queue.add(second.events, 50_000, removed=second.keys)
    assert queue.ledger.pending == 2
    queue.reopen()
    assert numbers(queue.queue.take(50_000, 10)) == [3, 4]


def test_a_batch_is_bounded_by_its_bytes(queue):
    big = some_events(6)
    big.lines[:] = [line[:-1] + b" " * 400_000 + b"}" for line in big.lines]
    queue.add(big, 1_000)
    taken = [numbers(queue.queue.take(1_000, 100)) for _ in range(2)]
    assert taken == [[0, 1, 2], [3, 4, 5]]


def test_an_entry_added_before_what_was_already_passed_is_found(queue):
    queue.add(some_events(2), 900_000)
    early = queue.queue.take(0, 2, early=True)
    assert numbers(early) == [0, 1]
    queue.add(some_events(1, first=7), 1_000)
    assert numbers(queue.queue.take(1_000, 10)) == [7]
    assert queue.queue.take(10**7, 10) is None


def test_entries_written_before_the_clock_was_set_back_do_not_wait_for_it(queue):
    queue.add(some_events(2), 10**12)
    assert numbers(queue.queue.take(5_000, 10)) == [0, 1]


def test_a_clock_set_back_while_entries_wait_does_not_hold_them_up(queue):
    now_us = 10**12
    queue.add(some_events(2), now_us + DELAY_US_MAX)
    assert queue.queue.take(now_us, 10) is None
    assert numbers(queue.queue.take(now_us - 3_600_000_000, 10)) == [0, 1]


def test_entries_wait_on_disk_not_in_memory(queue):
    for first in range(0, 5_000, 1_000):
        queue.add(some_events(1_000, first=first), 1_000 + first)
    taken = []
    while batch := queue.queue.take(10_000, 512):
        taken += numbers(batch)
        queue.joined(batch)
    assert taken == list(range(5_000))
    assert queue.ledger.pending == 0


def test_what_falls_due_before_all_that_wait_is_asked_for_in_time(queue):
    queue.add(some_events(1), 500_000)
    assert queue.queue.take(0, 10) is None
    queue.add(some_events(1), 100_000)
    assert queue.queue.next_due_us == 100_000
    queue.add(some_events(1), 300_000)
    assert queue.queue.next_due_us == 100_000
