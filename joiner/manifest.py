"""The manifest of one joiner in one output root: which of its files are complete.

A file is listed when it will never change again: a reader that takes listed files only reads nothing twice
and nothing that is taken back. The manifest also keeps a second joiner of the same name out of a root.
"""

import fcntl
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Final

from joiner.output_files import MANIFEST, CompleteFile, encode_entry, read_entries
from photon.core.disk import make_directory, storage_errors, sync_directory, write_all
from photon.core.errors import LockedError

_NUMBER: Final = re.compile(r"-(\d+)\.[a-z]+$")


def file_number(name: str) -> int:
    """NNNNNN of `<joiner>-NNNNNN.jsonl` or `.parquet`; -1 for a name that is none of ours."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else -1


class Manifest:
    """For one process and one thread at a time."""

    def __init__(self, directory: Path, stem: str) -> None:
        """LockedError if another process has it; CorruptStateError, StorageError. A torn last line is cut."""
        self.path = directory / f"{stem}{MANIFEST}"
        with storage_errors(self.path):
            make_directory(directory)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            with storage_errors(self.path):
                data = self.path.read_bytes()
                self._size = data.rfind(b"\n") + 1
                os.ftruncate(self._fd, self._size)
                sync_directory(directory)
            self._entries = [*read_entries(data, self.path).values()]
            self._listed = {entry.file for entry in self._entries}
        except BaseException:
            self.close()
            raise

    @property
    def listed(self) -> Set[str]:
        """Names of files."""
        return self._listed

    @property
    def entries(self) -> Sequence[CompleteFile]:
        """In the order of the manifest; it grows with it."""
        return self._entries

    @property
    def next_number(self) -> int:
        """Of files: greater than those of all that are listed, whether they are still there or not."""
        return 1 + max(map(file_number, self._listed), default=-1)

    def add(self, entry: CompleteFile) -> None:
        """List a file, durably. DiskFullError, StorageError: it is not listed, or will be listed twice."""
        line = encode_entry(entry)
        with storage_errors(self.path):
            try:
                write_all(self._fd, line)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(line)
            os.fdatasync(self._fd)
        self._listed.add(entry.file)
        self._entries.append(entry)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockedError(
                f"{self.path}: another joiner of this name writes here; stop it, or name another output"
            ) from error
