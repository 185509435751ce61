"""Who works in a dispatcher's directory: one process alone, or several, each in a slot of its own.

All of it is told by locks that the kernel drops when a process ends, however it does.
"""

import fcntl
import functools
import os
import time
from pathlib import Path
from typing import Final

from photon.core.disk import make_directory, storage_errors
from photon.core.errors import LockedError

CLAIM_TRIES: Final = 20
CLAIM_WAIT_S: Final = 0.05
"""A worker that looks whether a slot is free holds it for a moment: a claim tries again."""


class FileLock:
    """An flock on a file, held until `release` or the end of the process. BlockingIOError if it is taken."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        with storage_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hold_directory(directory: Path, alone: bool) -> FileLock:
    """Work in the directory, alone or beside others that share it. LockedError if that can't be."""
    with storage_errors(directory):
        make_directory(directory)
    try:
        return FileLock(directory / "lock", shared=not alone)
    except BlockingIOError as error:
        raise LockedError(
            f"{directory}: another process works in this directory; stop it or use another directory"
        ) from error


def claim_slot(directory: Path, workers: int) -> tuple[int, FileLock]:
    """The smallest free slot below `workers`. LockedError if there is none."""
    with storage_errors(directory):
        make_directory(directory / "workers")
    for _ in range(CLAIM_TRIES):
        for slot in range(workers):
            lock = try_slot(directory, slot)
            if lock is not None:
                return slot, lock
        time.sleep(CLAIM_WAIT_S)
    raise LockedError(
        f"{directory}: {workers} processes work in this directory already; stop one, or raise "
        "'dispatcher.workers' for all of them"
    )


def try_slot(directory: Path, slot: int) -> FileLock | None:
    """The slot's lock, if no process has it."""
    try:
        return FileLock(directory / "workers" / f"{slot}.lock")
    except BlockingIOError:
        return None


@functools.cache
def boot_id() -> str:
    """Names this boot of the machine: leases run on a clock that begins anew with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
