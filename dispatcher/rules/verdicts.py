"""The rules of one batch (paper 3.2): what an answer of registry or joiner makes of an event. Pure.

A batch's verdicts are a byte an event: a core.fates.Joined or a core.fates.Verdict.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.backoff import Backoffs, Uniform
from dispatcher.rules.events import Events, Resolved, Rows
from photon.core.backoff import Backoff
from photon.core.errors import UnavailableError
from photon.core.fates import (
    FATE_OF_VERDICT,
    LETTER_REASONS,
    LETTERS,
    RETRIED,
    VERDICT_OF_REGISTERED,
    Fate,
    Joined,
    Registered,
)
from photon.core.histogram import count_latencies, no_latencies
from photon.logs.writer import DeadLetter

# --- All that a dispatcher counts.

COUNTED: Final = tuple(fate for fate in Fate if fate is not Fate.PENDING)


@dataclass(frozen=True, slots=True)
class Totals:
    """All that is counted since the ledger was made. `latencies`: counts by latency.EDGES_US."""

    foreign_events: int
    fates: dict[Fate, int]
    wasted_joins: int
    latencies: list[int]

    @property
    def ended(self) -> int:
        """Events that have their fate."""
        return sum(self.fates.values())

    def plus(self, other: "Totals") -> "Totals":
        return Totals(
            self.foreign_events + other.foreign_events,
            {fate: self.fates.get(fate, 0) + other.fates.get(fate, 0) for fate in COUNTED},
            self.wasted_joins + other.wasted_joins,
            [a + b for a, b in zip_longest(self.latencies, other.latencies, fillvalue=0)],
        )


NOTHING: Final = Totals(0, dict.fromkeys(COUNTED, 0), 0, [])


Verdicts = npt.NDArray[np.uint8]

_VERDICTS: Final = 256


def judge_lookup(registered: bytes, count: int) -> Verdicts:
    """The registry's answer (core.fates.Registered) -> verdicts; SEND where the joiner must decide.

    UnavailableError if it is no answer to `count` events.
    """
    column = np.frombuffer(registered, np.uint8)
    if len(column) != count or (count and column.max() > max(Registered)):
        raise UnavailableError(
            f"the registry's answer to a lookup of {count} ids is not understood; "
            "run the same version everywhere"
        )
    return np.frombuffer(bytearray(registered.translate(VERDICT_OF_REGISTERED)), np.uint8)


def judge_join(outcomes: bytes, count: int) -> Verdicts:
    """The joiner's answer as verdicts. UnavailableError if it is no answer to `count` events."""
    column = np.frombuffer(outcomes, np.uint8)
    if len(column) != count or (count and column.max() > max(Joined)):
        raise UnavailableError(
            f"the joiner's answer to a batch of {count} events is not understood; "
            "run the same version everywhere"
        )
    return column


def resolve(
    events: Events,
    verdicts: Verdicts,
    reasons: Mapping[int, str],
    backoffs: Backoffs,
    at_us: npt.NDArray[np.int64],
    uniform: Uniform,
    due_us: npt.NDArray[np.int64] | None = None,
) -> Resolved:
    """Verdicts -> fates, dead letters and retries. `at_us` (N,): when the verdicts came.

    `due_us` (N,): of events that were sent before they were due. Where their primaries are not there they
    wait on as if they had not been sent.
    """
    counts = np.bincount(verdicts, minlength=_VERDICTS).tolist()
    fates: dict[Fate, int] = {}
    for verdict, fate in FATE_OF_VERDICT.items():
        if counts[verdict]:
            fates[fate] = fates.get(fate, 0) + counts[verdict]
    latencies = no_latencies()
    if counts[Joined.JOINED]:
        latencies = count_latencies((at_us - events.first_seen)[verdicts == Joined.JOINED])
    retries, next_due_us = _retries(events, verdicts, counts, backoffs, at_us, uniform, due_us)
    assert sum(fates.values()) + (len(retries) if retries else 0) == len(events)
    letters = _letters(events, verdicts, counts, reasons)
    return Resolved(fates, counts[Joined.DUPLICATE], latencies, letters, retries, next_due_us)


def _letters(
    events: Events, verdicts: Verdicts, counts: list[int], reasons: Mapping[int, str]
) -> list[DeadLetter]:
    dead = [verdict for verdict, fate in FATE_OF_VERDICT.items() if fate in LETTERS and counts[verdict]]
    letters = []
    for row in np.flatnonzero(np.isin(verdicts, dead)).tolist() if dead else ():
        fate = FATE_OF_VERDICT[int(verdicts[row])]
        reason = reasons.get(row) or LETTER_REASONS[fate]
        offset = int(events.offsets[row])
        letters.append(DeadLetter(fate, reason, events.lines[row], events.name(row), offset))
    return letters


def _retries(
    events: Events,
    verdicts: Verdicts,
    counts: list[int],
    backoffs: Backoffs,
    at_us: npt.NDArray[np.int64],
    uniform: Uniform,
    due_us: npt.NDArray[np.int64] | None,
) -> tuple[Events | None, npt.NDArray[np.int64]]:
    if not any(counts[verdict] for verdict in RETRIED):
        return None, np.empty(0, np.int64)
    rows: Rows = np.flatnonzero(np.isin(verdicts, RETRIED))
    kept = events.take(rows)
    absent = verdicts[rows] == Joined.RETRY_ABSENT
    now_us = at_us[rows]
    due = np.empty(len(rows), np.int64)
    if due_us is None:
        tries, sends = kept.tries + absent, kept.sends + np.uint32(1)
        ages_us = (now_us - kept.first_seen)[absent]
        due[absent] = now_us[absent] + backoffs.absent.delays_us(ages_us, tries[absent], uniform)
    else:
        tries, sends = kept.tries, kept.sends + ~absent
        due[absent] = due_us[rows][absent]
    failures = np.maximum(sends, tries) - tries
    due[~absent] = now_us[~absent] + _delays(failures[~absent], backoffs.failed, uniform)
    return dataclasses.replace(kept, tries=tries, sends=sends), due


def _delays(counts: npt.NDArray[np.uint32], backoff: Backoff, uniform: Uniform) -> npt.NDArray[np.int64]:
    """One draw for all that were tried equally often: they fall due together and travel together."""
    distinct, place = np.unique(counts, return_inverse=True)
    return np.array([backoff.delay_s(int(count), uniform) * 1e6 for count in distinct]).astype(np.int64)[
        place
    ]
