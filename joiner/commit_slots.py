"""The limit of commits on their way to the IdRegistry (paper 3.3.2): it bounds what a crash leaves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from photon.core.errors import OverloadedError


class CommitSlots:
    """For many threads at once."""

    def __init__(self, commits_max: int) -> None:
        self._commits_max = commits_max
        self._free = threading.BoundedSemaphore(commits_max)
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def taken(self, timeout_s: float | None) -> Iterator[None]:
        """One of the slots, waited for so long; None: for ever. OverloadedError: nothing was done."""
        if not self._free.acquire(timeout=timeout_s):
            raise OverloadedError(
                f"{self._commits_max} commits are on their way to the IdRegistry and none ended in time; "
                "send again later or raise joiner.commits_in_flight_max"
            )
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
            self._free.release()
