"""Keeps requests away while this joiner can't write: a full disk is no reason to look up and register."""

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from photon.core.clock import Clock
from photon.core.disk import storage_errors, write_all
from photon.core.errors import StorageError

PROBE_INTERVAL_S: Final = 0.5
PROBE_BYTES: Final = 1 << 20
"""About what one batch takes."""


class StorageGate:
    """Shut by a failed write of a log, open again when a write to that log works. For many threads at once.

    While it is shut, one request passes every PROBE_INTERVAL_S, to try; but few come, for health checks say
    NOT_SERVING then, so whoever answers those calls `probe`.
    """

    def __init__(self, clock: Clock, on_fatal: Callable[[BaseException], None] = lambda _: None) -> None:
        """`on_fatal` is told of a failure that only a restart can mend."""
        self._clock = clock
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._failures: dict[str, StorageError] = {}
        self._broken = False
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

    def probe(self, directories: Sequence[Path]) -> None:
        """Where it is shut, every PROBE_INTERVAL_S: open it if all these take a write."""
        if not self._failures or self._broken:
            return
        with self._lock:
            if self._clock.monotonic() < self._next_probe:
                return
            self._next_probe = self._clock.monotonic() + PROBE_INTERVAL_S
        try:
            for directory in directories:
                try_writing(directory)
        except StorageError:
            return
        with self._lock:
            self._failures.clear()

    def failed(self, log: str, error: StorageError, broken: bool) -> None:
        """`broken`: no later write to that log will work."""
        with self._lock:
            self._failures[log] = error
            self._broken |= broken
            self._next_probe = self._clock.monotonic() + PROBE_INTERVAL_S
        if broken:
            self._on_fatal(error)

    def worked(self, log: str) -> None:
        if log in self._failures:
            with self._lock:
                self._failures.pop(log, None)


def try_writing(directory: Path) -> None:
    """StorageError where a batch could not be written; leaves nothing behind."""
    with storage_errors(directory), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        write_all(file.fileno(), bytes(PROBE_BYTES))
        os.fsync(file.fileno())
