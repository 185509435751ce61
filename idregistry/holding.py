"""Who holds the rows of a segment. Pure.

Holder and token time are kept of those rows alone that have a token: 12 bytes each while all have one, 16
where some have none, nothing for a row whose token is cleared.
"""

import numpy as np
import numpy.typing as npt

from idregistry.arrays import array_of
from idregistry.holders import NOBODY

Rows = npt.NDArray[np.intp]
Stamps = npt.NDArray[np.void]


class Holding:
    """Up to `tokens` tokens, in the order of their rows. One thread writes; others read of rows there are.

    What is not filled takes no memory. While every row has a token, its place is its row; `_rows` is made
    when the first comes that has none.
    """

    def __init__(self, tokens: int, sparse: bool = False) -> None:
        self._holders = array_of(tokens, np.uint32)
        self._times_us = array_of(tokens, np.int64)
        self._rows = array_of(tokens, np.uint32) if sparse else None
        self._filled = 0
        self.cleared = 0
        """How many were taken in place; an id that was cleared twice at once counts twice."""

    # --- any thread

    def fill(self, start: int, stamps: Stamps) -> None:
        """Put the tokens of the rows from `start` on into these stamps, which have none yet."""
        rows = self._rows
        if rows is None:
            end = start + len(stamps)
            stamps["holder"] = self._holders[start:end]
            stamps["time_us"] = self._times_us[start:end]
            return
        limits = np.array((start, start + len(stamps)), np.uint32)
        first, last = rows[: self._filled].searchsorted(limits).tolist()
        at = rows[first:last] - limits[0]
        stamps["holder"][at] = self._holders[first:last]
        stamps["time_us"][at] = self._times_us[first:last]

    def take(self, rows: Rows, stamps: Stamps) -> None:
        """Put the tokens of any rows into their stamps, which have none yet."""
        which, at = self._places(rows)
        stamps["holder"][which] = self._holders[at]
        stamps["time_us"][which] = self._times_us[at]

    def _places(self, rows: Rows) -> tuple[Rows, Rows]:
        """(which of the rows have a token, where it is)."""
        known = self._rows
        if known is None:
            return np.arange(len(rows)), rows
        known = known[: self._filled]
        wanted = rows.astype(np.uint32)
        at = known.searchsorted(wanted)
        which = np.flatnonzero(at < len(known))
        which = which[known[at[which]] == wanted[which]]
        return which, at[which]

    @property
    def nbytes(self) -> int:
        """What is filled takes so many."""
        return self._filled * (12 if self._rows is None else 16)

    # --- the thread that writes

    def extend(self, start: int, stamps: Stamps) -> None:
        """The tokens of the rows from `start` on, which follow all that were there."""
        held = stamps["holder"] != NOBODY
        if self._rows is None and not held.all():
            rows = array_of(len(self._holders), np.uint32)
            rows[: self._filled] = np.arange(self._filled, dtype=np.uint32)
            self._rows = rows
        first, last = self._filled, self._filled + int(np.count_nonzero(held))
        if self._rows is not None:
            self._rows[first:last] = np.flatnonzero(held) + start
        self._holders[first:last] = stamps["holder"][held]
        self._times_us[first:last] = stamps["time_us"][held]
        self._filled = last  # at last: a reader looks no further

    def clear(self, rows: Rows) -> None:
        """Take the tokens of these rows, where they have any."""
        at = self._places(np.sort(rows))[1]  # in order, the search is faster
        self.cleared += int(np.count_nonzero(self._holders[at]))
        self._holders[at] = NOBODY
        self._times_us[at] = 0

    @property
    def held(self) -> int:
        """How many tokens there are. 4 ms for ten million."""
        return int(np.count_nonzero(self._holders[: self._filled]))

    def copy(self, first: int, last: int, to: "Holding") -> bool:
        """Append what is left of the tokens `first` to `last` - 1; whether there are more behind them."""
        held = np.flatnonzero(self._holders[first : min(last, self._filled)]) + first
        start, end = to._filled, to._filled + len(held)
        assert to._rows is not None, "what is copied has gaps"
        to._rows[start:end] = held if self._rows is None else self._rows[held]
        to._holders[start:end] = self._holders[held]
        to._times_us[start:end] = self._times_us[held]
        to._filled = end
        return last < self._filled
