"""A process that is stopped (SIGSTOP) while it writes to the shared state, or waits to.

It holds everybody else up: LMDB's one write lock is given back by the dead, not by the stopped. Its lease
runs out all the same, so it may not go on anyway: a worker that was held up for a lease ends it for good.
"""

import contextlib
import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from photon.core.clock import Clock
from photon.core.disk import storage_errors

SLOTS_MAX: Final = 64
LOOKS: Final = 4
"""So often in the time of a lease it is looked at."""

_MARK: Final = struct.Struct("=QQQ")  # process id, its start in clock ticks since boot, 1 while it writes
_STOPPED: Final = "T"


class WriteMarks:
    """A file in memory in which each slot notes that it writes."""

    def __init__(self, directory: Path, slot: int, clock: Clock) -> None:
        self._slot = slot
        self._clock = clock
        self._since: float | None = None
        self._own = os.getpid(), _stat(os.getpid())[1]
        path = directory / "workers" / "writing"
        with storage_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, SLOTS_MAX * _MARK.size)
                self._map = mmap.mmap(fd, SLOTS_MAX * _MARK.size)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around each transaction that writes; a process has one at a time."""
        self._since = self._clock.monotonic()
        _MARK.pack_into(self._map, self._slot * _MARK.size, *self._own, 1)
        try:
            yield
        finally:
            self._since = None
            _MARK.pack_into(self._map, self._slot * _MARK.size, *self._own, 0)

    def held_up_s(self) -> float:
        """How long this process's present transaction has lasted, waiting for the others' included."""
        since = self._since
        return 0.0 if since is None else self._clock.monotonic() - since

    def end_stopped(self, notice: Callable[[str], None]) -> None:
        """End the processes that are stopped in the middle of a transaction."""
        for slot in range(SLOTS_MAX):
            pid, start, writes = _MARK.unpack_from(self._map, slot * _MARK.size)
            if writes and slot != self._slot and _end_if_stopped(pid, start):
                notice(f"worker {slot} (process {pid}) was stopped while it wrote: it was ended")


class Watch:
    """A thread that sees to it that this worker is not held up for longer than a lease."""

    def __init__(self, marks: WriteMarks, lease_s: float, notice: Callable[[str], None]) -> None:
        self._marks = marks
        self._lease_s = lease_s
        self._notice = notice
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the last transaction: until then it may be held up."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._lease_s / LOOKS):
            if self._marks.held_up_s() > self._lease_s:
                self._marks.end_stopped(self._notice)


def _end_if_stopped(pid: int, start: int) -> bool:
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)  # so that the signal goes to the process that was looked at
        try:
            if _stat(pid) == (_STOPPED, start):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return True
        finally:
            os.close(process)
    return False


def _stat(pid: int) -> tuple[str, int]:
    """State and start of a process, as the kernel tells; ("", 0) if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])
