"""Copies of an event that differ: one id is joined once, whatever other lines have it. Pure.

Whether a duplicate is a plain repetition is told as far as the last REMEMBERED ids reach.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.events import Events
from photon.core.fates import Differing, Joined, Verdict
from photon.core.ids import ID_BYTES, opaque_mask

REMEMBERED: Final = 1 << 17
_ROW: Final = np.dtype(
    [("id", f"V{ID_BYTES}"), ("primary_id", f"V{ID_BYTES}"), ("time", "<i8"), ("content", "<i8")]
)
_REGISTERED: Final = (Joined.JOINED, Joined.DUPLICATE, Verdict.REGISTERED)
_MIXED: Final = np.uint64(0x9E3779B97F4A7C15)


class Copies:
    """What the last ids were registered with. Not for several threads at once."""

    def __init__(self, spread_us: int) -> None:
        self._spread_us = spread_us
        self._kept = np.zeros(REMEMBERED, _ROW)

    def differing(self, events: Events, verdicts: npt.NDArray[np.uint8]) -> dict[int, Differing]:
        """Remember a batch that was answered; which of its duplicates differ, by row."""
        rows = np.flatnonzero(np.isin(verdicts, _REGISTERED))
        if not len(rows):
            return {}
        told = np.empty(len(rows), _ROW)
        told["id"] = np.frombuffer(events.ids, f"V{ID_BYTES}")[rows]
        told["primary_id"] = np.frombuffer(events.primary_ids, f"V{ID_BYTES}")[rows]
        told["time"] = np.frombuffer(events.times, "<i8")[rows]
        told["content"] = [hash(events.lines[row]) for row in rows.tolist()]
        halves = told["id"].copy().view("<u8").reshape(-1, 2)
        places = ((halves[:, 0] ^ halves[:, 1]) * _MIXED) >> np.uint64(64 - REMEMBERED.bit_length() + 1)
        joined = verdicts[rows] == Joined.JOINED
        # What is joined stands for its id, else what was seen first.
        new = np.flatnonzero(~joined & (self._kept["id"][places] != told["id"]))[::-1]
        for some in (new, np.flatnonzero(joined)):
            self._kept[places[some]] = told[some]
        kept = self._kept[places]
        other = ~joined & (kept["id"] == told["id"]) & (kept["content"] != told["content"])
        apart = opaque_mask(told["id"].tobytes()) & (np.abs(kept["time"] - told["time"]) > self._spread_us)
        found = {}
        for row in np.flatnonzero(other):
            how = Differing.TIME if apart[row] else Differing.CONTENT
            if kept["primary_id"][row] != told["primary_id"][row]:
                how = Differing.PRIMARY
            found[int(rows[row])] = how
        return found
