"""Waits after failures: they double up to a bound."""

from photon.core.clock import Attempts, Backoff, Pause


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
