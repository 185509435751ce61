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
        rows = lower_bounds(self.hashes, wanted)
        rows[rows == len(self)] = 0
        rows[self.hashes[rows] != wanted] = -1
        return rows

    def find_all(self, wanted: Hashes) -> tuple[Ints, Places]:
        """Sorted hashes -> the places of all their entries, and whose each is."""
        low = lower_bounds(self.hashes, wanted)
        counts = np.searchsorted(self.hashes, wanted, "right") - low
        begins = np.cumsum(counts) - counts
        rows = np.arange(int(counts.sum())) + np.repeat(low - begins, counts)
        return np.repeat(np.arange(len(wanted)), counts), self.places[rows]


GREAT: Final = 1 << 21
"""From so many hashes on a guess is cheaper than a search: see lower_bounds."""
_GUESSES: Final = 3
_AROUND: Final = 32


def lower_bounds(hashes: Hashes, wanted: Hashes) -> Ints:
    """Sorted hashes and W sorted others -> for each of these the row of the first that is not less.

    Hashes are spread evenly, so a row can be guessed, and the guess bettered by what stands there. A search
    looks at twenty places one after the other, most of them in no cache; guesses look at four, and for all
    that are wanted at once. Where they are wrong, as for a hash that stands there often, it searches.
    """
    count, last = len(hashes), len(hashes) - 1
    if count < GREAT:
        return np.asarray(np.searchsorted(hashes, wanted))
    scale, aims = count / 2.0**64, wanted.astype(np.float64)
    rows = np.minimum((aims * scale).astype(np.int64), last)
    for _ in range(_GUESSES):
        rows += np.rint((aims - hashes[rows]) * scale).astype(np.int64)
        np.clip(rows, 0, last, out=rows)
    low: Ints = np.maximum(rows - _AROUND, 0)
    high: Ints = np.minimum(rows + _AROUND, count)
    for _ in range((2 * _AROUND).bit_length()):
        middle = (low + high) >> 1
        is_less = (hashes[np.minimum(middle, last)] < wanted) & (low < high)
        np.copyto(low, middle + 1, where=is_less)
        np.copyto(high, middle, where=~is_less)
    is_wrong = (low > 0) & (hashes[np.maximum(low - 1, 0)] >= wanted)
    is_wrong |= (low < count) & (hashes[np.minimum(low, last)] < wanted)
    low[is_wrong] = np.searchsorted(hashes, wanted[is_wrong])
    return low


def entries_of(hashes: Hashes, files: Ints, starts: Ints, lengths: Ints) -> tuple[Entries, Ints]:
    """N events in the order they were read -> their entries, and the row that each of these came from."""
    order = np.argsort(hashes, kind="stable")
    places = np.empty(len(order), PLACE)
    places["offset"], places["file"], places["length"] = starts, files, lengths
    return Entries(hashes[order], places[order]), order


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
