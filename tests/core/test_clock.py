"""Waits after failures, which double up to a bound, and the loop of work in the background."""

import threading

from photon.core.clock import Attempts, Background, Backoff, Pause
from photon.core.errors import StorageError


def test_waits_double_up_to_a_bound():
    backoff = Backoff(0.005, 0.25)
    delays = [backoff.delay_s(failures) for failures in range(1, 10_000)]
    assert delays[:4] == [0.005, 0.01, 0.02, 0.04]
    assert delays[-1] == max(delays) == 0.25
    assert backoff.delay_s(0) == 0.005


def test_jitter_takes_up_to_half_of_a_wait_and_adds_nothing():
    backoff = Backoff(0.005, 0.25)
    for failures in range(1, 100):
        full = backoff.delay_s(failures)
        assert backoff.delay_s(failures, lambda low, _high: low) == full / 2
        assert backoff.delay_s(failures, lambda _low, high: high) == full


def test_pauses_grow_with_each_failure_and_end_with_a_success():
    pause, now = Pause(Backoff(0.05, 2.0)), 0.0
    for length in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert pause.is_over(now)
        pause.failed(now)
        pause.failed(now + length / 2)  # of a second request that was under way
        assert not pause.is_over(now + 0.999 * length)
        now += 1.001 * length
    assert pause.is_over(now)
    pause.worked()
    pause.failed(now)
    assert pause.is_over(now + 0.051)


class _Time:
    """A clock that waits by moving on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def attempts(self, timeout_s: float) -> Attempts:
        return Attempts(Backoff(1.0, 4.0), timeout_s, lambda: self.now_s, self.wait)


def test_attempts_wait_longer_each_time_and_never_beyond_the_deadline():
    time = _Time()
    assert list(time.attempts(10.0)) == [10.0, 9.0, 7.0, 3.0]
    assert time.waits == [1.0, 2.0, 4.0, 3.0]


def test_an_attempt_may_follow_at_once_and_does_not_count_as_a_wait():
    time = _Time()
    attempts = time.attempts(2.0)
    for tries, left_s in enumerate(attempts):
        if tries < 3:
            assert left_s == attempts.left_s == 2.0
            attempts.next_at_once()
    assert time.waits == [1.0, 1.0]


def test_there_is_no_attempt_without_time():
    assert not list(_Time().attempts(0.0))


NEVER = float("inf")


class Steps:
    """Does as the list says, one step after the other, and tells of each."""

    def __init__(self, *results, retries=Backoff(0.001, 0.002)):
        self._results = list(results)
        self.taken = threading.Semaphore(0)
        self.work = Background("work", self._step, retries)

    def _step(self):
        result = self._results.pop(0)
        self.taken.release()
        if isinstance(result, Exception):
            raise result
        return result

    def took(self, count):
        for _ in range(count):
            assert self.taken.acquire(timeout=60)


def test_a_step_is_taken_again_when_it_is_wanted_and_when_woken():
    steps = Steps(0.0, 0.001, NEVER, NEVER)
    steps.work.start()
    steps.took(3)
    steps.work.wake()
    steps.took(1)
    assert steps.work.stop(60)


def test_a_step_that_fails_is_taken_again_and_says_why():
    steps = Steps(StorageError("the disk is gone"), ValueError("odd"), NEVER)
    steps.work.start()
    steps.took(3)
    assert steps.work.stop(60)
    assert (steps.work.failures, steps.work.trouble) == (0, None)

    failing = Steps(StorageError("the disk is gone"), retries=Backoff(3600, 3600))
    failing.work.start()
    failing.took(1)
    assert failing.work.stop(60), "a pause ends with it"
    assert (failing.work.failures, failing.work.trouble) == (1, "the disk is gone")

    strange = Steps(ValueError("odd"), retries=Backoff(3600, 3600))
    strange.work.start()
    strange.took(1)
    assert strange.work.stop(60)
    assert strange.work.trouble == "ValueError: odd"


def test_what_rests_within_a_step_is_let_go_when_stopped():
    began, gave_up = threading.Event(), []

    def step():
        began.set()
        gave_up.append(work.rest(3600))
        return NEVER

    work = Background("work", step)
    work.start()
    assert began.wait(60)
    assert not work.stopping
    assert work.stop(60)
    assert gave_up == [True]
    assert work.stop(60), "once more"


def test_one_that_was_never_started_stops_at_once():
    assert Steps().work.stop()
