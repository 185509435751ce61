"""Events that are fed in again (dead letters, recovery): whole files of them, put into a directory by rename.

They are followed like logs. A file of which everything is recorded is deleted.
"""

import contextlib
import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from photon.core.disk import make_directory, storage_errors
from photon.core.errors import StorageError
from photon.core.logfiles import FileState


class Inbox:
    """`<directory>/inbox/*.jsonl`."""

    def __init__(self, directory: Path, sync: Callable[[], None]) -> None:
        """`sync` makes durable what is recorded: after it a power cut takes none of it. StorageError."""
        self._path = (directory / "inbox").absolute()
        self._sync = sync
        with storage_errors(self._path):
            make_directory(self._path)

    @property
    def pattern(self) -> str:
        return f"{glob.escape(str(self._path))}/*.jsonl"

    def notices(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """`tell`, but for what is said of files that were deleted here: that is as it should be."""

        def heed(line: str) -> None:
            if not (line.startswith(f"{self._path}{os.sep}") and " is gone" in line):
                tell(line)

        return heed

    def sweep(self, states: Iterable[FileState]) -> None:
        """Delete those of these files that are recorded to their end, as their states in the ledger say."""
        # Whatever hinders it now is met again at the next start; nothing is read twice.
        with contextlib.suppress(StorageError):
            done = [state for state in states if self._is_done(state)]
            if done:
                self._sync()
            for state in done:
                with contextlib.suppress(OSError):
                    os.unlink(state.path)

    def holds(self, state: FileState) -> bool:
        """Whether it is a file of the inbox."""
        return os.path.dirname(state.path) == str(self._path)

    def _is_done(self, state: FileState) -> bool:
        if state.gone or not self.holds(state):
            return False
        try:
            status = os.stat(state.path)
        except OSError:
            return False
        return status.st_ino == state.inode and state.offset >= status.st_size
