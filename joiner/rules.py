"""A request to the joiner, its answer, and how the one becomes the other (paper 3.3.1). Pure.

All in packed columns: what an event's outcome is, given what the others answered.
"""

from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import count_lines, join_lines, split_ids, split_lines, unpack_times
from photon.core.errors import UsageError
from photon.core.fates import JOINED_OF_COMMITTED, JOINED_OF_FOUND, Committed, Found, Joined
from photon.core.ids import ID_BYTES
from photon.core.settings import BATCH_IDS_MAX, Joiner

_WIDTHS: Final = {"primary_ids": ID_BYTES, "times": 8, "tries": 4, "ages": 8}


@dataclass(frozen=True, slots=True)
class ForeignColumns:
    """N foreign events."""

    ids: bytes
    """16 x N."""
    primary_ids: bytes
    """16 x N."""
    times: bytes
    """8 x N, int64 us: event times."""
    events: bytes
    """N lines, each a JSON object without space around it, closed by a newline."""
    tries: bytes
    """4 x N, uint32: tries before this one."""
    ages: bytes
    """8 x N, int64 us: how long ago the dispatcher first read the event, by its own clock alone."""

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES

    def check(self) -> None:
        """UsageError if the columns are not of one length, or too long."""
        count = len(self)
        wrong = [name for name, width in _WIDTHS.items() if len(getattr(self, name)) != width * count]
        if count > BATCH_IDS_MAX:
            raise UsageError(f"{count} events in one request, at most {BATCH_IDS_MAX} are taken")
        if len(self.ids) % ID_BYTES:
            wrong.append("ids")
        if count_lines(self.events) != count or not (self.events.endswith(b"\n") or not self.events):
            wrong.append("events")
        if wrong:
            raise UsageError(
                f"columns of {count} events: {', '.join(wrong)} of another length; send all N rows"
            )


@dataclass(frozen=True, slots=True)
class JoinOutcomes:
    """What became of N foreign events: 1 x N core.fates.Joined; by row, the reasons of those that end."""

    outcomes: bytes
    reasons: dict[int, str]


Rows = npt.NDArray[np.intp]
Outcomes = npt.NDArray[np.uint8]

EXPIRED_REASON: Final = "older than the IdRegistry remembers"


def outcomes_of_lookup(
    found: bytes, batch: ForeignColumns, patience: Joiner, drain: bool
) -> tuple[Outcomes, dict[int, str]]:
    """N outcomes, JOINED where the primary was found (the event goes on); the reasons of the unjoinable.

    `drain`: the logs grow no more, so absent is final.
    """
    answers = np.frombuffer(found, np.uint8)
    outcomes = np.frombuffer(bytearray(found.translate(JOINED_OF_FOUND)), np.uint8)
    tries = np.frombuffer(batch.tries, "<u4")
    age_us = np.frombuffer(batch.ages, "<i8")
    given_up = answers == Found.ABSENT
    if not drain:
        given_up &= (tries >= patience.unjoinable_tries_min) & (age_us >= patience.unjoinable_age_s * 1e6)
    outcomes[given_up] = Joined.UNJOINABLE
    reasons = {
        int(row): "no primary event in the logs"
        if drain
        else f"no primary event after {int(tries[row]) + 1} tries in {age_us[row] / 1e6:.0f} s"
        for row in np.flatnonzero(given_up)
    }
    return outcomes, reasons


def repeated_rows(ids: bytes, times: bytes) -> dict[int, int]:
    """Rows of an id that stands more than once -> the one that is registered: the youngest, which may be
    taken where the others are expired, and the first of those."""
    keys = split_ids(ids)
    if len(set(keys)) == len(keys):
        return {}
    time_us = unpack_times(times)
    youngest: dict[bytes, int] = {}
    for row, key in enumerate(keys):
        if time_us[row] > time_us[youngest.setdefault(key, row)]:
            youngest[key] = row
    return {row: youngest[key] for row, key in enumerate(keys) if row != youngest[key]}


def outcomes_of_commit(committed: bytes) -> bytes:
    """1 x N core.fates.Committed -> 1 x N core.fates.Joined."""
    return committed.translate(JOINED_OF_COMMITTED)


def winning_lines(committed: bytes, lines: bytes) -> bytes:
    """Of N newline-closed lines, those whose ids were won."""
    if committed.count(Committed.WON) == len(committed):
        return lines
    return take_lines(lines, np.frombuffer(committed, np.uint8) == Committed.WON)


def take_lines(lines: bytes, mask: npt.NDArray[np.bool_]) -> bytes:
    """The chosen ones of N newline-closed lines."""
    return join_lines(list(compress(split_lines(lines), mask.tolist())))
