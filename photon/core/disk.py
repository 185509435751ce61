"""What we ask of the disk: whole writes, durable names, one owner a directory; its errors in our words."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

from photon.core.errors import DiskFullError, LockedError, StorageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOCK_NAME: Final = "lock"


def write_all(fd: int, data: bytes) -> None:
    """Write every byte at the file's offset. Raises OSError, with some of them written perhaps."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def write_again(path: Path, data: bytes, offset: int) -> None:
    """Write bytes over themselves, so that the next sync of the file does write them. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(fd)


def sync_data(fd: int) -> None:
    """Make a file's bytes and size durable. Raises OSError; the file must not be trusted after a failure."""
    os.fdatasync(fd)


def sync_directory(directory: Path) -> None:
    """Make creations, renames and deletions in the directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(temporary: Path, final: Path) -> None:
    """Put a file that is already synced in place of another, durably. Raises OSError."""
    temporary.rename(final)
    sync_directory(final.parent)


def write_file(path: Path, data: bytes, put: Callable[[Path, Path], None] = replace) -> None:
    """Replace a small file, whole or not at all, durably, readable by its owner alone. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    put(temporary, path)


def make_directory(directory: Path) -> None:
    """Create it and what is missing above it, durably. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
    # Though it is there: who made it may have been killed before this, and a power loss would take it away.
    sync_directory(directory.parent)


def storage_error(error: OSError, path: Path) -> StorageError:
    """The error to raise (from the OSError) when a write, sync or open of `path` failed."""
    if error.errno in _FULL:
        return DiskFullError(
            f"{path}: no space left ({error.strerror}); free some, nothing acknowledged is lost"
        )
    return StorageError(f"{path}: {error.strerror or error}; check the disk and the permissions")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """An OSError inside becomes the storage error of `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


class DirectoryLock:
    """Holds a directory for this process; the kernel lets go of it when the process ends, however it does."""

    def __init__(self, directory: Path) -> None:
        """LockedError if another process has it; StorageError if there can be no directory."""
        path = directory / _LOCK_NAME
        with storage_errors(path):
            make_directory(directory)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise LockedError(
                f"{directory}: another process works in this directory; stop it or use another directory"
            ) from error

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
