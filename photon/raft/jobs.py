"""Work beside the raft thread: one piece at a time, in a thread of its own (never a forked process)."""

import threading
from collections.abc import Callable


class ThreadJob:
    """One piece of work; `finished` is called in its thread at the end."""

    def __init__(self, work: Callable[[], None], finished: Callable[[], None]) -> None:
        self._work = work
        self._finished = finished
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="raft-snapshot", daemon=True)

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> None:
        """Raises what the work raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed over: `result` raises it in the raft thread
            self._error = error
        finally:
            self._done.set()
            self._finished()


class BackgroundJobs:
    """The jobs of one host. Raft thread only."""

    def __init__(self, finished: Callable[[], None]) -> None:
        """`finished`: called from the job's thread when one ends."""
        self._finished = finished
        self._running: ThreadJob | None = None

    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self, work: Callable[[], None]) -> ThreadJob:
        assert not self.busy()
        job = self._running = ThreadJob(work, self._finished)
        job.thread.start()
        return job

    def join(self, seconds: float) -> None:
        """Wait for the running job to end."""
        if self._running is not None:
            self._running.thread.join(seconds)
