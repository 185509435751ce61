"""Which bytes of which log files a task reads. Pure, but for `local_file`."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from photon.core.errors import StorageError
from photon.core.packed import is_packed

_OPEN_BYTES: Final = 1 << 16
"""What opening a file costs, as bytes read: so that ten thousand little ones are no single task."""
_SPLIT_BYTES_MIN: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log on a disk that every executor sees: its first `size` bytes are read, from `start` on.

    What a log that grows has gained since is left for the next time. `number`: the caller's own.
    """

    name: str
    size: int
    start: int = 0
    number: int = 0

    @property
    def whole(self) -> bool:
        """Whether one task must read all of it, as of what is packed."""
        return is_packed(self.name)


@dataclass(frozen=True, slots=True)
class Range:
    """Of a file the lines that begin at `start` or later and before `end`."""

    file: LogFile
    start: int
    end: int


def local_file(name: str, number: int = 0, start: int = 0) -> LogFile:
    """StorageError if it can't be looked at."""
    try:
        return LogFile(name, os.stat(name).st_size, start, number)
    except OSError as error:
        raise StorageError(f"{name} cannot be read ({error.strerror}); see to its permissions") from error


def split_bytes(files: Iterable[LogFile], most: int, parallelism: int) -> int:
    """How much a task reads: `most`, or less where there would be fewer tasks than can run at a time."""
    total = sum(file.size - file.start + _OPEN_BYTES for file in files)
    return max(1, min(most, max(_SPLIT_BYTES_MIN, -(-total // max(1, parallelism)))))


def tasks_of(files: Sequence[LogFile], split: int) -> list[list[Range]]:
    """Each task's ranges, in the order of the files: about `split` bytes, of one large file or many small."""
    tasks: list[list[Range]] = []
    room = 0
    for file in files:
        for piece in _pieces(file, split):
            cost = piece.end - piece.start + _OPEN_BYTES
            if not tasks or cost > room:
                tasks.append([])
                room = split + _OPEN_BYTES
            tasks[-1].append(piece)
            room -= cost
    return tasks


def _pieces(file: LogFile, split: int) -> list[Range]:
    if file.start >= file.size:
        return []
    if file.whole or file.size - file.start <= split:
        return [Range(file, file.start, file.size)]
    starts = range(file.start, file.size, split)
    return [Range(file, start, min(start + split, file.size)) for start in starts]
