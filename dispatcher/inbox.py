"""Events that are fed in again (dead letters, recovery): whole files of them, put into a directory by rename.

They are followed like logs. A file of which everything is recorded is deleted. Events that recovery released
are in files of their own, RECOVERED: a replica of the registry that lags behind the release still calls them
present, so they go to a joiner, whatever a lookup says.
"""

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from photon.core.disk import make_directory, storage_errors, sync_directory
from photon.core.errors import StorageError
from photon.logs.files import FileState

RECOVERED: Final = "recovered-"
"""What the names of recovery's files begin with."""

_DELETED: Final = " is gone;", " shrank to ", " was overwritten;"
"""What is told of a file that is no more; its inode may be that of the next file by now."""


def put(lines: Path, inbox: Path, name: str, partly: Callable[[], None] = lambda: None) -> None:
    """Copy a file of events into an inbox, durably, as `name`: whole or not at all. StorageError.

    Where it is there already it is left alone; one that was read meanwhile is read again, and its events are
    duplicates. `partly` is called before the rename.
    """
    final, temporary = inbox / name, inbox / f".{name}.partial"
    with storage_errors(temporary):
        make_directory(inbox)
        if final.exists():
            sync_directory(inbox)  # whoever renamed it may have been killed before this
            return
        with lines.open("rb") as source, temporary.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        partly()
        temporary.rename(final)
        sync_directory(inbox)


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
            if not line.startswith(f"{self._path}{os.sep}") or not any(what in line for what in _DELETED):
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

    def is_recovered(self, name: str) -> bool:
        """Whether the file of this name came from recovery."""
        directory, base = os.path.split(name)
        return base.startswith(RECOVERED) and directory == str(self._path)

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
