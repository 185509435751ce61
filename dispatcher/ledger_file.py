"""LMDB as the ledger uses it: opened, locked, and its errors in the house's words."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from photon.core.errors import CorruptStateError, DiskFullError, LockedError, StorageError

_DATABASES_MAX: Final = 4
_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
)


def lock_directory(directory: Path) -> int:
    """Make the directory ours until the returned descriptor is closed. LockedError if it is another's."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise LockedError(
            f"{directory}: another dispatcher works on this directory; stop it or name another directory"
        ) from error
    return fd


def open_environment(path: Path, bytes_max: int) -> lmdb.Environment:
    """The LMDB environment in `path`; without a sync of its meta page each commit is one fdatasync.

    After a power cut the last commit may be missing, whole; what was read then is read again.
    """
    with ledger_errors(path):
        return lmdb.open(str(path), map_size=bytes_max, max_dbs=_DATABASES_MAX, metasync=False)


@contextlib.contextmanager
def ledger_errors(path: Path) -> Iterator[None]:
    """lmdb.Error as DiskFullError, CorruptStateError or StorageError."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise DiskFullError(
            f"{path}: the dispatcher's state is full; raise 'dispatcher.state_bytes_max' and restart, "
            "nothing is lost"
        ) from error
    except _CORRUPT as error:
        raise corrupt(path, str(error)) from error
    except lmdb.Error as error:
        text = str(error)
        if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            raise DiskFullError(
                f"{path}: no space left for the dispatcher's state; free some, nothing is lost"
            ) from error
        if os.strerror(errno.EIO) in text:  # LMDB says so of a write that was cut short, too
            text += "; the disk is full or failing, nothing is lost"
        raise StorageError(f"{path}: {text}") from error


def corrupt(path: Path, what: str) -> CorruptStateError:
    return CorruptStateError(
        f"{path}: the dispatcher's state is damaged ({what}); restore it, or delete the directory to read "
        "all foreign logs again (what is registered is not joined twice)"
    )
