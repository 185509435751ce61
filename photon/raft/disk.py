"""What a replica asks of the disk, and says where the disk failed it."""

import errno
from pathlib import Path

from photon.core.disk import replace, sync_directory, write_file
from photon.core.errors import CorruptStateError, DiskFullError, StorageError

__all__ = [
    "REPLACE_IT",
    "DamagedError",
    "corrupt",
    "replace",
    "storage_error",
    "sync_directory",
    "write_file",
]

# What mends a replica that has lost anything: it may have forgotten a vote, or what it acknowledged.
REPLACE_IT = (
    "replace this node: start an empty one under a new name and have it take this one's place, "
    "or, where it was the only one, restore a backup (a replica that forgot must never come back "
    "to the others under its old name)"
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


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
