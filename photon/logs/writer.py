"""Append-only log files that rotate at a maximum size, and the dead letters, written exactly once."""

import base64
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.disk import make_directory, storage_error, storage_errors, sync_directory, write_all
from photon.core.errors import StorageError
from photon.core.fates import Fate
from photon.logs.files import end_of_last_line

_NAME_DIGITS: Final = 6
_SUFFIX: Final = ".jsonl"


@dataclass(frozen=True, slots=True, order=True)
class LogPosition:
    """A place in a rotating log: file number and byte offset in it. Later places are greater."""

    file: int
    offset: int


class RotatingLog:
    """Files `<directory>/<stem>-000000.jsonl`, `-000001`, ... of which the last one grows.

    For one process and any number of threads. A failed append is taken back. After a failed sync nothing is
    known of what is on disk: every later append and sync raises the same error.
    """

    def __init__(
        self, directory: Path, stem: str, file_bytes_max: int, first: int = 0, read_at_once: bool = False
    ) -> None:
        """Goes on in the last file there is; in number `first` if that is later. `read_at_once`: a reader may
        be past what an append wrote before it failed, so that stays, as a crash leaves it, and who writes
        opens the log anew."""
        self.directory = directory
        self._stem = stem
        self._file_bytes_max, self._read_at_once = file_bytes_max, read_at_once
        self._lock = threading.Lock()
        self._failure: StorageError | None = None
        self._turn = threading.Condition()
        self._syncing = False
        self._synced = LogPosition(-1, 0)
        """Everything before is durable."""
        with storage_errors(directory):
            make_directory(directory)
        numbers = self.file_numbers()
        self._file = max([first, *numbers[-1:]])
        self._fd = self._open(self._file)
        self._size = os.fstat(self._fd).st_size

    def path(self, file: int) -> Path:
        return self.directory / f"{self._stem}-{file:0{_NAME_DIGITS}d}{_SUFFIX}"

    def file_numbers(self) -> list[int]:
        """Numbers of the files there are, ascending."""
        head = f"{self._stem}-"
        names = [n for n in os.listdir(self.directory) if n.startswith(head) and n.endswith(_SUFFIX)]
        numbers = [n.removeprefix(head).removesuffix(_SUFFIX) for n in names]
        return sorted(int(n) for n in numbers if n.isascii() and n.isdigit())

    @property
    def position(self) -> LogPosition:
        """Where the next append goes, unless it rotates first."""
        with self._lock:
            return LogPosition(self._file, self._size)

    @property
    def broken(self) -> bool:
        """No write will work any more: only a restart can tell what is on disk."""
        return self._failure is not None

    def append(self, data: bytes, rotate: bool = True) -> LogPosition:
        """Write whole lines (readable at once, durable after sync). The position after them.

        They stand together in one file: `len(data)` bytes before that position. `rotate`: in a new one if
        this one would grow too large; not for what completes a line. DiskFullError or
        StorageError if they could not be written: then none of them is in the file (but `read_at_once`).
        """
        with self._lock:
            if rotate and self._size and self._size + len(data) > self._file_bytes_max:
                self._rotate(self._file + 1)
            self._write(data)
            self._size += len(data)
            return LogPosition(self._file, self._size)

    def sync(self, upto: LogPosition | None = None) -> None:
        """Return when all that stands before `upto` (else: all that was appended) is durable.

        Threads that wait at the same time share one fdatasync. StorageError if it failed.
        """
        upto = self.position if upto is None else upto
        with self._turn:
            while self._syncing and self._synced < upto:
                self._turn.wait()
            if self._synced >= upto:
                return
            self._syncing = True
        reached = self._synced
        try:
            reached = self._sync_all()
        finally:
            with self._turn:
                self._syncing = False
                self._synced = max(self._synced, reached)
                self._turn.notify_all()

    def rotate(self, past: int = -1) -> None:
        """Go on in a new file, whose number is greater than `past` and than any there is."""
        with self._lock:
            self._rotate(max(self._file, past) + 1)

    def truncate(self, position: LogPosition) -> None:
        """Cut everything after `position`, later files included."""
        with self._lock, storage_errors(self.directory):
            for number in self.file_numbers():
                if number > position.file:
                    self.path(number).unlink()
            previous, self._fd = self._fd, self._open(position.file)
            os.close(previous)
            self._file = position.file
            if os.fstat(self._fd).st_size > position.offset:
                os.ftruncate(self._fd, position.offset)
            self._size = os.fstat(self._fd).st_size
            self._synced = LogPosition(-1, 0)

    def cut_torn_line(self) -> int:
        """Cut an unfinished last line, as a crash leaves it; how many bytes were cut."""
        with self._lock, storage_errors(self.path(self._file)):
            keep = end_of_last_line(self._fd, self._size)
            torn = self._size - keep
            if torn:
                os.ftruncate(self._fd, keep)
                self._size = keep
            return torn

    def close(self) -> None:
        """Everything after this raises StorageError."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _open(self, file: int) -> int:
        path = self.path(file)
        with storage_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            # Else a power cut may take the file and all that was synced in it, though it is not new: who made
            # it may have been killed before this.
            sync_directory(self.directory)
            return fd

    def _rotate(self, number: int) -> None:
        self._check_usable()
        self._sync_file(self._fd)
        fd = self._open(number)
        os.close(self._fd)
        self._fd, self._file = fd, number
        self._size = os.fstat(fd).st_size

    def _write(self, data: bytes) -> None:
        self._check_usable()
        try:
            write_all(self._fd, data)
        except OSError as error:
            failure = storage_error(error, self.path(self._file))
            if self._read_at_once:
                self._failure = failure
            else:
                try:
                    os.ftruncate(self._fd, self._size)
                except OSError:
                    self._failure = failure  # a partial line stands there: only a restart can cut it
            raise failure from error

    def _sync_all(self) -> LogPosition:
        with self._lock:
            self._check_usable()
            target = LogPosition(self._file, self._size)
            with storage_errors(self.path(self._file)):
                fd = os.dup(self._fd)  # a rotation may close the file meanwhile
        try:
            self._sync_file(fd)
        finally:
            os.close(fd)
        return target

    def _sync_file(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError as error:
            # The kernel has dropped what it could not write; another fdatasync would say that all is well.
            self._failure = storage_error(error, self.path(self._file))
            raise self._failure from error

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._fd < 0:
            raise StorageError(f"{self.path(self._file)}: already closed; open it again")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that will not be joined, and why. `name` and `offset`: the log line it was; `log`: the number
    of that file, where a ledger has numbers."""

    fate: Fate
    reason: str
    event: bytes
    name: str
    offset: int
    log: int = 0


def dead_letter_lines(letters: Iterable[DeadLetter]) -> bytes:
    """One JSON object a line: fate, reason, event, file, offset.

    `event` is the event's own object; of a malformed line it is its text, and its exact bytes stand in
    `event_base64` where they are no UTF-8.
    """
    return b"".join([_dead_letter_line(letter) for letter in letters])


def _dead_letter_line(letter: DeadLetter) -> bytes:
    record: dict[str, object] = {"fate": letter.fate.value, "reason": letter.reason}
    if letter.fate is Fate.MALFORMED:
        try:
            record["event"] = letter.event.decode("utf-8")
        except UnicodeDecodeError:
            record["event"] = letter.event.decode("utf-8", "replace")
            record["event_base64"] = base64.b64encode(letter.event).decode("ascii")
    else:
        record["event"] = msgspec.Raw(letter.event)
    record |= {"file": letter.name, "offset": letter.offset}
    return msgspec.json.encode(record) + b"\n"
