"""What an event that is early by hours costs, and the gate of requests."""

import random
import threading

import numpy as np
import pytest

from dispatcher.rules import verdicts as pipeline
from dispatcher.rules.pacing import Pacing
from dispatcher.rules.verdicts import Backoffs
from dispatcher.sender import Gate
from photon.core.clock import ManualClock
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Joined
from photon.core.settings import Settings
from tests.dispatcher.fakes import some_events

HOUR_US = 3_600_000_000


@pytest.mark.parametrize(("early_us", "tries_max"), [
    (HOUR_US // 1200, 19), (HOUR_US // 60, 25), (HOUR_US, 35), (6 * HOUR_US, 41), (24 * HOUR_US, 61),
])  # fmt: skip
def test_an_early_event_takes_few_tries_and_is_joined_half_as_long_after_its_primary(early_us, tries_max):
    backoffs, rng = Backoffs.of(Settings().dispatcher), random.Random(1).uniform
    for _ in range(50):
        events, now_us, tries = some_events(1), 0, 0
        events.first_seen[:] = 0
        while now_us < early_us:
            absent = np.array([Joined.RETRY_ABSENT], np.uint8)
            resolved = pipeline.resolve(events, absent, {}, backoffs, np.array([now_us]), rng)
            events, now_us, tries = resolved.retries, int(resolved.due_us[0]), tries + 1
        assert now_us - early_us <= min(early_us / 2, HOUR_US)
        assert tries <= tries_max


def test_an_event_that_was_hardly_tried_when_all_stopped_for_hours_is_tried_soon():
    backoffs, rng = Backoffs.of(Settings().dispatcher), random.Random(1).uniform
    events = some_events(1, tries=3)
    absent = np.array([Joined.RETRY_ABSENT], np.uint8)
    resolved = pipeline.resolve(events, absent, {}, backoffs, np.array([8 * HOUR_US]), rng)
    assert resolved.due_us[0] - 8 * HOUR_US <= 160_000


def test_what_failed_waits_by_its_failures_and_never_longer_than_a_minute():
    backoffs, rng = Backoffs.of(Settings().dispatcher), random.Random(1).uniform
    events = some_events(2, tries=20)
    events.sends[:] = [20, 60]
    failed = np.array([Joined.RETRY_UNAVAILABLE] * 2, np.uint8)
    resolved = pipeline.resolve(events, failed, {}, backoffs, np.zeros(2, np.int64), rng)
    assert resolved.retries.tries.tolist() == [20, 20]
    assert resolved.due_us[0] <= 20_000 and 30_000_000 <= resolved.due_us[1] <= 60_000_000


def gate(senders: int, clock: ManualClock) -> Gate:
    return Gate(Pacing(senders, 100, 100, 100), clock, random.Random(1), threading.Event(), print)


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
