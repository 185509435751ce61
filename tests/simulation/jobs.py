"""A node's work beside its raft thread."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from photon.raft import snapshot
from tests.simulation.clock import Clock
from tests.simulation.own_holes import patched


def brief_rests() -> AbstractContextManager[None]:
    """A piece of work takes many times as long here as in life, so its rest need not."""
    return patched(snapshot, "RESTS", 1)


@dataclass(slots=True)
class Job:
    """Work that is done whole, at some moment from its start until it is found ready."""

    work: Callable[[], None] | None
    ready_at: float
    clock: Clock
    error: Exception | None = None

    def run(self) -> None:
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work()
        except Exception as error:
            self.error = error

    def done(self) -> bool:
        return self.clock.at >= self.ready_at

    def result(self) -> None:
        self.run()
        if self.error is not None:
            raise self.error


class Jobs:
    """A node's background work, one piece at a time; `running` until the next one begins.

    Every other one is done at its start, and lies there for a while; the rest at their ends, when much has
    changed.
    """

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self._rng = rng
        self._clock = clock
        self.running: Job | None = None
        self.started = 0

    def busy(self) -> bool:
        return self.running is not None and not self.running.done()

    def start(self, work: Callable[[], None]) -> Job:
        job = self.running = Job(work, self._clock.at + self._rng.random() * 0.5, self._clock)
        self.started += 1
        if self.started % 2:
            job.run()
        return job
