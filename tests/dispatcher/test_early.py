"""Retries before their time, the window of requests, and what an event early by hours costs: pure rules."""

import random
import threading

import numpy as np
import pytest

from dispatcher.driver import backoffs_of
from dispatcher.rules import verdicts as pipeline
from dispatcher.rules.early import PAUSE_S_MAX, PAUSE_S_MIN, EarlyRetries
from dispatcher.window import Gate, Window
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
    backoffs, rng = backoffs_of(Settings().dispatcher), random.Random(1)
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
    backoffs, rng = backoffs_of(Settings().dispatcher), random.Random(1)
    events = some_events(1, tries=3)
    absent = np.array([Joined.RETRY_ABSENT], np.uint8)
    resolved = pipeline.resolve(events, absent, {}, backoffs, np.array([8 * HOUR_US]), rng)
    assert resolved.due_us[0] - 8 * HOUR_US <= 160_000


def test_what_failed_waits_by_its_failures_and_never_longer_than_a_minute():
    backoffs, rng = backoffs_of(Settings().dispatcher), random.Random(1)
    events = some_events(2, tries=20)
    events.sends[:] = [20, 60]
    failed = np.array([Joined.RETRY_UNAVAILABLE] * 2, np.uint8)
    resolved = pipeline.resolve(events, failed, {}, backoffs, np.zeros(2, np.int64), rng)
    assert resolved.retries.tries.tolist() == [20, 20]
    assert resolved.due_us[0] <= 20_000 and 30_000_000 <= resolved.due_us[1] <= 60_000_000


def test_retries_that_join_bring_others_before_their_time():
    early = EarlyRetries(1000)
    assert early.take(0.0) == 0
    early.observe(10, 5, False, 0.0)
    assert early.take(0.0) == 0
    early.observe(10, 4, False, 0.0)
    assert early.take(0.0) == 20
    assert early.take(0.0) == 0
    early.observe(900, 0, True, 0.0)
    assert early.take(0.0) == 1000


def test_what_joins_while_retries_before_their_time_pause_brings_others_after_the_pause():
    early = EarlyRetries(1000)
    early.observe(10, 10, True, 0.0)
    early.observe(10, 0, False, 0.1)
    assert early.take(0.1) == 0
    assert early.take(PAUSE_S_MIN) == 20, "though nothing joined since"


def test_retries_in_vain_before_their_time_grow_rare_though_others_join_all_the_while():
    early, now, vain = EarlyRetries(1000), 0.0, 0
    while now < 6 * 3600:
        early.observe(10, 0, False, now)
        if early.take(now):
            vain += 1
            early.observe(20, 20, True, now)
        now += 1.0
    assert vain < 60
    early.observe(10, 0, False, now + PAUSE_S_MAX)
    assert early.take(now + PAUSE_S_MAX)
    early.observe(20, 0, True, now + PAUSE_S_MAX)
    assert early.take(now + PAUSE_S_MAX), "they join: at once again"


def test_the_window_is_halved_once_by_what_was_under_way_together_and_grows_by_one_a_window():
    window = Window(16)
    assert window.size == 16
    window.refused(1.0, 1.1)
    window.refused(1.05, 1.2)
    assert window.size == 8
    window.refused(1.3, 1.4)
    assert window.size == 4
    for _ in range(5):
        window.answered(2.0, 2.1)
    assert window.size == 5
    for _ in range(1000):
        window.answered(3.0, 3.1)
    assert window.size == 16


def test_answers_that_take_long_narrow_the_window_and_it_never_closes():
    window, now = Window(4, slow_s=1.0), 0.0
    for _ in range(10):
        window.answered(now, now + 2.0)
        now += 3.0
    assert window.size == 1


def test_the_gate_learns_from_what_becomes_of_requests_and_lets_as_many_in_as_the_window_says():
    clock = ManualClock()
    gate = Gate(Window(2), clock)
    clock.advance(1.0)
    assert gate.enter(lambda: False)
    assert gate.enter(lambda: False)
    assert not gate.enter(lambda: True), "full, and it is time to stop"
    with pytest.raises(OverloadedError), gate.request():
        raise OverloadedError("too much")
    assert gate.size == 1
    assert not gate.enter(lambda: True)
    with pytest.raises(UnavailableError), gate.request():
        raise UnavailableError("gone")
    assert gate.enter(lambda: True)


def test_a_thread_that_waits_at_the_gate_goes_on_as_another_leaves():
    gate = Gate(Window(1), ManualClock())
    assert gate.enter(lambda: False)
    entered = threading.Event()

    def wait():
        gate.enter(lambda: False)
        entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.is_set()
    with gate.request():
        pass
    thread.join(10)
    assert entered.is_set()
