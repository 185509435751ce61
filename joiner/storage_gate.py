"""Keeps requests away while this joiner can't write: a full disk is no reason to look up and register."""

import threading
from collections.abc import Callable
from typing import Final

from photon.core.clock import Clock
from photon.core.errors import StorageError

PROBE_INTERVAL_S: Final = 0.5


class StorageGate:
    """Shut by a failed write of a log, open again when a write to that log works. For many threads at once.

    While it is shut, one request passes every PROBE_INTERVAL_S, to try.
    """

    def __init__(self, clock: Clock, on_fatal: Callable[[BaseException], None] = lambda _: None) -> None:
        """`on_fatal` is told of a failure that only a restart can mend."""
        self._clock = clock
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._failures: dict[str, StorageError] = {}
        self._next_probe = 0.0

    @property
    def error(self) -> str | None:
        """What is wrong, or None."""
        failures = list(self._failures.values())
        return str(failures[0]) if failures else None

    def check(self) -> None:
        """StorageError while it is shut."""
        if not self._failures:
            return
        with self._lock:
            failure = next(iter(self._failures.values()), None)
            if failure is None:
                return
            if self._clock.monotonic() >= self._next_probe:
                self._next_probe = self._clock.monotonic() + PROBE_INTERVAL_S
                return
        raise type(failure)(str(failure))

    def failed(self, log: str, error: StorageError, broken: bool) -> None:
        """`broken`: no later write to that log will work."""
        with self._lock:
            self._failures[log] = error
            self._next_probe = self._clock.monotonic() + PROBE_INTERVAL_S
        if broken:
            self._on_fatal(error)

    def worked(self, log: str) -> None:
        if log in self._failures:
            with self._lock:
                self._failures.pop(log, None)
