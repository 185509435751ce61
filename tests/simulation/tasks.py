"""Calls that block, by the world's clock: each in a thread of its own, and one at a time."""

import heapq
import threading
from collections.abc import Callable
from itertools import count

from tests.simulation.clock import Clock


class _Over(BaseException):
    """The simulation has ended."""


class _Task(threading.Thread):
    def __init__(self, work: Callable[[], None], back: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.go = threading.Semaphore(0)
        self.done = False
        self.waits = 0  # which of its waits it is in
        self.error: BaseException | None = None
        self._work = work
        self._back = back

    def run(self) -> None:
        self.go.acquire()
        try:
            self._work()
        except _Over:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()


class Tasks:
    """`step` at `due_at`. What a task calls, `sleep` and `wait`, is called in its own thread alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._back = threading.Semaphore(0)
        self._tasks: list[_Task] = []
        self._running: _Task | None = None
        self._due: list[tuple[float, int, _Task, int]] = []
        self._numbers = count()
        self._over = False

    @property
    def due_at(self) -> float:
        return self._due[0][0] if self._due else float("inf")

    @property
    def done(self) -> bool:
        return all(task.done for task in self._tasks)

    def begin(self, work: Callable[[], None]) -> None:
        task = _Task(work, self._back)
        self._tasks.append(task)
        task.start()
        self._wake_at(self._clock.at, task, task.waits)

    def step(self) -> None:
        """Whoever is due goes on until it waits."""
        _, _, task, waits = heapq.heappop(self._due)
        if waits == task.waits and not task.done:
            self._go_on(task)

    def close(self) -> None:
        self._over = True
        for task in self._tasks:
            while not task.done:
                self._go_on(task)
            task.join()

    def _go_on(self, task: _Task) -> None:
        self._running = task
        task.go.release()
        self._back.acquire()
        self._running = None
        if task.error is not None and not self._over:
            raise task.error

    def _wake_at(self, at: float, task: _Task, waits: int) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), task, waits))

    @property
    def running(self) -> object:
        """Which task is at work; None between them."""
        return self._running

    # -- what a task calls ------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """So long, or until what `waking` returned before is called."""
        task = self._running
        assert task is threading.current_thread()
        self._wake_at(self._clock.at + seconds, task, task.waits)
        self._back.release()
        task.go.acquire()
        task.waits += 1
        if self._over:
            raise _Over

    def waking(self) -> Callable[[], None]:
        """Ends the next wait of the task that calls this, from wherever it is called."""
        task = self._running
        assert task is not None
        waits = task.waits
        return lambda: self._wake_at(self._clock.at, task, waits)
