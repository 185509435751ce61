"""A node's work beside its raft thread."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.clock import Clock


@dataclass(slots=True)
class Job:
    """Work that is done, all at once, when it is found ready."""

    work: Callable[[], None]
    ready_at: float
    clock: Clock

    def done(self) -> bool:
        return self.clock.at >= self.ready_at

    def result(self) -> None:
        self.work()


class Jobs:
    """A node's background work, one piece at a time; `running` until the next one begins."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self._rng = rng
        self._clock = clock
        self.running: Job | None = None
        self.started = 0

    def busy(self) -> bool:
        return self.running is not None and not self.running.done()

    def start(self, work: Callable[[], None]) -> Job:
        self.running = Job(work, self._clock.at + self._rng.random() * 0.5, self._clock)
        self.started += 1
        return self.running
