"""Events that are fed in again (dead letters, recovery): whole files of them, put into a directory by rename.

They are followed like logs. A file of which everything is recorded is deleted.
"""

import contextlib
import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from photon.core.disk import make_directory, storage_errors
from photon.core.logfiles import FileState


class Inbox:
    """`<directory>/inbox/*.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self._path = (directory / "inbox").absolute()
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
        """Delete those of these files that are recorded to their end, as their states on disk say."""
        for state in states:
            if state.gone or os.path.dirname(state.path) != str(self._path):
                continue
            # Whatever hinders it now is met again at the next start; it is never read twice.
            with contextlib.suppress(OSError):
                status = os.stat(state.path)
                if status.st_ino == state.inode and state.offset >= status.st_size:
                    os.unlink(state.path)
