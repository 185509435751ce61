"""What we ask of the disk: whole writes, durable names, one owner a directory, LMDB opened in one way.

Errors of the disk and of LMDB come in our words: what is full, what is damaged, and how to mend it.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import lmdb
import msgspec

from photon.core.errors import CorruptStateError, DiskFullError, LockedError, StorageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK_BYTES: Final = 1 << 20
_LOCK_NAME: Final = "lock"
_DATABASES_MAX: Final = 16
_Kind = TypeVar("_Kind")
_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_OTHER_FORMAT: Final = "is not supported by this build"
"""What py-lmdb itself says before it opens a file, in an error of no kind of its own."""


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


def lines_in(path: Path) -> int:
    """Newlines in a file, which is read to where it ends. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))


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


def write_json(path: Path, value: object) -> None:
    """Put it there for `read_json`, as `write_file` does. StorageError."""
    with storage_errors(path):
        write_file(path, msgspec.json.encode(value))


def read_json(path: Path, kind: type[_Kind], damaged: str = "{}; restore it") -> _Kind | None:
    """What `write_json` has put there; None if there is nothing. `damaged`: what is told of a file that holds
    something else, around the reason. CorruptStateError, StorageError."""
    with storage_errors(path):
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except ValueError as error:  # UnicodeDecodeError too
            raise CorruptStateError(f"{path}: {damaged.format(error)}") from error


def make_directory(directory: Path) -> None:
    """Create it and what is missing above it, durably. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        try:
            directory.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from error
    # Though it is there: who made it may have been killed before this, and a power loss would take it away.
    sync_directory(directory.parent)


def storage_error(error: OSError, path: Path) -> StorageError:
    """The error to raise (from the OSError) when a write, sync or open of `path` failed."""
    if error.errno in _FULL:
        return DiskFullError(
            f"{path}: no space left ({error.strerror}); free some, nothing acknowledged is lost"
        )
    if error.errno == errno.EMFILE:
        return StorageError(f"{path}: {error.strerror}; raise the limit (ulimit -n, systemd's LimitNOFILE)")
    if error.errno == errno.ENOTDIR:
        return StorageError(f"{path}: {error.strerror}; give another path")
    return StorageError(f"{path}: {error.strerror or error}; check the disk and the permissions")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """An OSError inside becomes the storage error of `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def open_alone(path: Path, refusal: str, flags: int = 0) -> int:
    """Open or create a file for reading and writing, until it is closed by this process alone.

    LockedError, which says `refusal`, if another process has it; StorageError. The kernel lets go of it when
    the process ends, however it does.
    """
    with storage_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise LockedError(f"{path}: {refusal}") from error
    return fd


class DirectoryLock:
    """Holds a directory for this process."""

    def __init__(self, directory: Path) -> None:
        """LockedError if another process has it; StorageError if there can be no directory."""
        with storage_errors(directory):
            make_directory(directory)
        self._fd = open_alone(
            directory / _LOCK_NAME,
            "another process works in this directory; stop it or use another directory",
        )

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def stays(error: StorageError) -> bool:
    """Whether an LMDB environment refuses all work until it is opened anew, after a failed write of its meta
    page."""
    return isinstance(error.__cause__, lmdb.PanicError)


@dataclass(frozen=True, slots=True)
class LmdbFile:
    """One environment on disk and what a person is told of it.

    `what`: what it holds; `setting`: the one that bounds it; `mend`: what to do when it is damaged.
    """

    path: Path
    what: str
    setting: str
    mend: str

    def open(self, bytes_max: int, metasync: bool = False, **options: Any) -> lmdb.Environment:
        """Without a sync of its meta page each commit is one fdatasync.

        A power cut may take the last commit then, never half of one. What it held is read again, so whoever
        destroys what a commit made needless (a file, say) does `sync(True)` between the two.
        """
        with self.errors():
            self.path.mkdir(parents=True, exist_ok=True)
            return lmdb.open(
                str(self.path), map_size=bytes_max, max_dbs=_DATABASES_MAX, metasync=metasync, **options
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
        if isinstance(error, _CORRUPT) or _OTHER_FORMAT in text:
            return self.corrupt(text)
        if isinstance(error, lmdb.PanicError):
            return StorageError(
                f"{self.path}: a write to {self.what} failed and it must be opened anew; check the disk"
            )
        if any(os.strerror(code) in text for code in _FULL):
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
