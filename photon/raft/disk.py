"""What the log asks of the disk, in one place, so that a simulation can play the disk."""

import errno
import os
from pathlib import Path

from photon.core import disk
from photon.core.disk import sync_directory, write_all
from photon.core.errors import CorruptStateError, DiskFullError, StorageError

__all__ = [
    "REPLACE_IT",
    "DamagedError",
    "corrupt",
    "replace",
    "storage_error",
    "sync_data",
    "sync_directory",
    "write_again",
    "write_all",
    "write_file",
]

# What mends a replica that has lost anything: it may have forgotten a vote, or what it acknowledged.
REPLACE_IT = (
    "replace this node: start an empty one under a new name and have it take this one's place, "
    "or, where it was the only one, restore a backup (a replica that forgot must never come back "
    "to the others under its old name)"
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def write_again(path: Path, data: bytes, offset: int) -> None:
    """Write bytes over themselves, so that the next sync of the file does write them. Raises OSError."""
    fd = os.open(path, os.O_WRONLY)
    try:
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(fd)


def sync_data(fd: int) -> None:
    """Make a file's bytes and size durable. Raises OSError; the file must not be trusted after a failure."""
    os.fdatasync(fd)


def replace(temporary: Path, final: Path) -> None:
    """Put a file that is already synced in place of another, durably. Raises OSError."""
    temporary.rename(final)
    sync_directory(final.parent)


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file, whole or not at all, durably. Raises OSError."""
    disk.write_file(path, data, put=replace)


def storage_error(path: Path, doing: str, error: OSError) -> StorageError:
    """The error to raise when the disk failed us (always chained from the OSError)."""
    if error.errno in _FULL:
        return DiskFullError(
            f"{path}: no space left while {doing}; nothing unsynced was acknowledged: free space and restart"
        )
    return StorageError(
        f"{path}: {error.strerror or error} while {doing}; nothing unsynced was acknowledged: "
        "check the disk and restart"
    )


class DamagedError(CorruptStateError):
    """A file does not hold what was written to it, or is gone. `what`: just that, where it can be mended."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REPLACE_IT}")
        self.what = what


def corrupt(path: Path, what: str) -> DamagedError:
    """The error to raise when a file does not hold what was written to it, or is not there any more."""
    return DamagedError(path, what)
