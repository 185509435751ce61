"""The loop of work in the background."""

import threading

from photon.core.clock import Background, Backoff
from photon.core.errors import StorageError

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
