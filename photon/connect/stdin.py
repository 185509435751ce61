"""Standard input as a log file: what it brings is copied into one, and read there as any other.

It can't be asked for again what it brought before, so each run has a file of its own. Who pipes the same
events into the next run has them told as duplicates.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from photon.core.errors import PhotonError, told
from photon.logs.writer import RotatingLog

STDIN: Final = "-"
_READ_BYTES: Final = 1 << 20


def pattern_of(directory: Path, side: str) -> str:
    """Of the log files that standard input is copied into."""
    return str(directory / f"stdin-{side}-*.jsonl")


def copy_stdin(directory: Path, side: str, file_bytes_max: int, fd: int = 0) -> None:
    """Return when it ends and all of it is durable. DiskFullError, StorageError, OSError."""
    log = RotatingLog(directory, f"stdin-{side}", file_bytes_max)
    try:
        if log.position.offset:
            log.rotate()
        rest = b""
        while block := os.read(fd, _READ_BYTES):
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                log.append(lines + newline)
        if rest:
            log.append(rest + b"\n")
        log.sync()
    finally:
        log.close()


def follow_stdin(
    directory: Path, side: str, file_bytes_max: int, notice: Callable[[str], None], fd: int = 0
) -> None:
    """The same in a thread, which tells how it ended."""

    def copy() -> None:
        try:
            copy_stdin(directory, side, file_bytes_max, fd)
        except (PhotonError, OSError) as error:
            notice(f"standard input is read no more: {told(error)}")
        else:
            notice("standard input has ended")

    threading.Thread(target=copy, name="stdin", daemon=True).start()
