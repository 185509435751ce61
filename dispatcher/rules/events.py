"""Foreign events as columns, with where each line stood and how often it was sent."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import take_ids, take_times

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Events:
    """N foreign events in columns; row i of each is event i.

    ids, primary_ids: 16 x N bytes; times: 8 x N bytes; lines: N, without newlines;
    tries (N,) uint32: answers so far that its primary is not there; sends (N,) uint32: times it was sent
    (neither with those in vain before it was due);
    first_seen (N,) int64: when it was first read, us; offsets (N,) int64: of its line in its file;
    names: file names; name_from: row i stood in names[j], j the last with name_from[j] <= i.
    """

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    tries: npt.NDArray[np.uint32]
    sends: npt.NDArray[np.uint32]
    first_seen: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    names: Sequence[str]
    name_from: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, row: int) -> str:
        """The file that row's line stood in."""
        return self.names[bisect.bisect_right(self.name_from, row) - 1]

    def take(self, rows: Rows) -> "Events":
        """The chosen rows, ascending."""
        if len(rows) == len(self):
            return self
        chosen = rows.tolist()
        return Events(
            take_ids(self.ids, rows),
            take_ids(self.primary_ids, rows),
            take_times(self.times, rows),
            take_lines(self.lines, chosen),
            self.tries[rows],
            self.sends[rows],
            self.first_seen[rows],
            self.offsets[rows],
            [self.name(row) for row in chosen] if len(self.names) > 1 else self.names,
            range(len(chosen)) if len(self.names) > 1 else self.name_from,
        )


def take_lines(lines: list[bytes], rows: list[int]) -> list[bytes]:
    """The chosen rows."""
    if len(rows) < 2:
        return [lines[row] for row in rows]
    return list(itemgetter(*rows)(lines))


NO_EVENTS: Final = Events(
    b"",
    b"",
    b"",
    [],
    np.zeros(0, np.uint32),
    np.zeros(0, np.uint32),
    np.zeros(0, np.int64),
    np.zeros(0, np.int64),
    [""],
    [0],
)
