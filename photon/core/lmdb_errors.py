"""LMDB as the rooms use it: opened one way, its errors in the house's words."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from photon.core.errors import CorruptStateError, DiskFullError, StorageError

_DATABASES_MAX: Final = 16
_FULL: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


@dataclass(frozen=True, slots=True)
class LmdbFile:
    """One environment on disk and what a person is told of it.

    `what`: what it holds; `setting`: the one that bounds it; `mend`: what to do when it is damaged.
    """

    path: Path
    what: str
    setting: str
    mend: str

    def open(self, bytes_max: int, **options: Any) -> lmdb.Environment:
        """Without a sync of its meta page each commit is one fdatasync.

        A power cut may take the last commit, never half of one. What it held is read again, so whoever
        destroys what a commit made needless (a file, say) does `sync(True)` between the two.
        """
        with self.errors():
            self.path.mkdir(parents=True, exist_ok=True)
            return lmdb.open(
                str(self.path), map_size=bytes_max, max_dbs=_DATABASES_MAX, metasync=False, **options
            )

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """lmdb.Error or OSError as DiskFullError, CorruptStateError or StorageError."""
        try:
            yield
        except (lmdb.Error, OSError) as error:
            raise self.storage_error(error) from error

    def storage_error(self, error: Exception) -> StorageError:
        text = str(error)
        if isinstance(error, lmdb.MapFullError):
            return self.full()
        if isinstance(error, _CORRUPT):
            return self.corrupt(text)
        if any(reason in text for reason in _FULL):
            return DiskFullError(f"{self.path}: no space left for {self.what}; free some, nothing is lost")
        if os.strerror(errno.EIO) in text:  # LMDB says so of a write that was cut short, too
            text += "; the disk is full or failing, nothing is lost"
        return StorageError(f"{self.path}: {text}")

    def full(self) -> DiskFullError:
        return DiskFullError(
            f"{self.path}: {self.what} is full; raise '{self.setting}' and start again, nothing is lost"
        )

    def corrupt(self, why: str) -> CorruptStateError:
        return CorruptStateError(f"{self.path}: {self.what} is damaged ({why}); {self.mend}")
