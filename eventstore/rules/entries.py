"""Entries of the log file map: for each event the hash of its id, and its place (paper 3.4.2). Pure.

An entry takes 24 bytes: hash (8), offset (8), file number (4), length (4). The hash does not prove anything:
whoever reads a line looks at its id. Two of 100 million ids share a hash with a probability of 0.03 %; both
keep their entries, and so does each line of an id that stands several times in the logs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

FAN: Final = 4
"""So many segments of a level become one of the next."""

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.void]
PLACE: Final = np.dtype([("offset", "<u8"), ("file", "<u4"), ("length", "<u4")])
"""Bytes of a log."""


@dataclass(frozen=True, slots=True)
class Entries:
    """N entries in the order of their hashes; of equal ones those that were read first come first."""

    hashes: Hashes
    places: Places

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, rows: Any) -> "Entries":
        return Entries(self.hashes[rows], self.places[rows])

    def find(self, wanted: Hashes) -> Ints:
        """Sorted hashes -> the rows of their first entries, -1 where there is none."""
        if not len(self):
            return np.full(len(wanted), -1, np.int64)
        rows = np.searchsorted(self.hashes, wanted)
        rows[rows == len(self)] = 0
        rows[self.hashes[rows] != wanted] = -1
        return rows

    def find_all(self, wanted: Hashes) -> tuple[Ints, Places]:
        """Sorted hashes -> the places of all their entries, and whose each is."""
        low = np.searchsorted(self.hashes, wanted)
        counts = np.searchsorted(self.hashes, wanted, "right") - low
        begins = np.cumsum(counts) - counts
        rows = np.arange(int(counts.sum())) + np.repeat(low - begins, counts)
        return np.repeat(np.arange(len(wanted)), counts), self.places[rows]


def entries_of(hashes: Hashes, files: Ints, starts: Ints, lengths: Ints) -> tuple[Entries, Ints]:
    """N events in the order they were read -> their entries, and the row that each of these came from."""
    order = np.argsort(hashes, kind="stable")
    places = np.empty(len(order), PLACE)
    places["offset"], places["file"], places["length"] = starts[order], files[order], lengths[order]
    return Entries(hashes[order], places), order


def joined(parts: Sequence[Entries]) -> Entries:
    """One of several, the oldest first; at least one."""
    if len(parts) == 1:
        return parts[0]
    hashes = np.concatenate([part.hashes for part in parts])
    order = np.argsort(hashes, kind="stable")
    return Entries(hashes[order], np.concatenate([part.places for part in parts])[order])


def first_places(
    tables: Sequence[Entries], wanted: Hashes, live: npt.NDArray[np.bool_]
) -> tuple[Ints, Places]:
    """Sorted hashes -> those that have an entry in a file that is there, and the place of the first.

    `tables`: the oldest first. `live`: by file number, whether the file is there.
    """
    places = np.empty(len(wanted), PLACE)
    found = np.zeros(len(wanted), np.bool_)
    dead = np.zeros(len(wanted), np.bool_)
    left = np.arange(len(wanted))
    for table in tables:
        rows = table.find(wanted[left])
        hit = rows >= 0
        if not hit.any():
            continue
        these = left[hit]
        places[these] = table.places[rows[hit]]
        found[these] = True
        left = left[~hit]
    chosen = np.flatnonzero(found)
    dead[chosen] = ~live[places["file"][chosen]]
    if dead.any():
        # Their first log is deleted: where they stand in others.
        asked = np.flatnonzero(dead)
        whose, others = all_places(tables, wanted[asked], live)
        first, at = np.unique(whose, return_index=True)
        found[asked] = False
        found[asked[first]] = True
        places[asked[first]] = others[at]
        chosen = np.flatnonzero(found)
    return chosen, places[chosen]


def all_places(tables: Iterable[Entries], wanted: Hashes, live: npt.NDArray[np.bool_]) -> tuple[Ints, Places]:
    """Sorted hashes -> their places in files that are there, each one's in the order they were read."""
    parts = [table.find_all(wanted) for table in tables]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, PLACE)
    whose, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(whose, kind="stable")
    order = order[live[places["file"][order]]]
    return whose[order], places[order]


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A segment in the list, which is oldest first. Those of one level are of about one size."""

    number: int
    level: int


def job_of(listed: Sequence[Listed]) -> list[Listed] | None:
    """The segments to merge next: the oldest FAN neighbours of the least level that has so many."""
    groups = [list(group) for _, group in groupby(listed, key=lambda segment: segment.level)]
    full = [group[:FAN] for group in groups if len(group) >= FAN]
    return full[-1] if full else None


def level_of(entries: int, flushed: int) -> int:
    """Of a segment of so many entries, as merges of segments of `flushed` would have made it."""
    level = 0
    while entries >= flushed * FAN ** (level + 1):
        level += 1
    return level
