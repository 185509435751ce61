"""Which process reads which log file, where several share the reading (paper 3.2). A port: no rules here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from photon.core.logfiles import FileState, SeenFile


@dataclass(frozen=True, slots=True)
class Share:
    """What this process reads from now on.

    `mine`: SeenFile.source of the files that it may read now; others are not even unpacked. A file that it
    holds and that was seen, but is neither in `mine` nor in `leave`, is paused until it is in `mine` again.
    `taken`: of these, the records of files that it did not hold before: they are read on from their offsets.
    `leave`: numbers of files of which no more is handed out, until the owner calls `release(number)`.
    """

    mine: frozenset[tuple[int, int]]
    taken: Sequence[FileState]
    leave: frozenset[int]


class Claims(Protocol):
    """Asked by one follower, in its thread (LogFollower.scan_if_due)."""

    def share(self, seen: Sequence[SeenFile]) -> Share:
        """Called once a scan with all files that match, whoever reads them; compressed ones still packed.

        The same object as last time if nothing was found to have changed. A file that this process holds and
        no pattern matches any more (renamed) is not in `seen` and stays with it.
        """
        ...

    def held_elsewhere(self, file: SeenFile) -> bool:
        """Whether another process knows what this file holds (a rotated log that was compressed or copied).

        That one then goes on with it, and it is not to be read here. Asked of each file that is in `mine` and
        of which nothing is known here, before anything of it is read; `path` is what is read, unpacked.
        """
        ...

    def number(self) -> int:
        """A file number that nobody of the group has used."""
        ...
