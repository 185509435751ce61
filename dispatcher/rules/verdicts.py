"""The rules of one batch (paper 3.2): what an answer of registry or joiner makes of an event. Pure.

A batch's verdicts are a byte an event: a core.fates.Joined or a core.fates.Verdict.

An event without a fate waits for its next try (3.2.1), with jitter and a cap. After a failure the wait
doubles (photon.core.clock.Backoff). What waits for its primary, and is not woken by its arrival
(rules/awaited), is tried again when half its age has passed once more: an event early by T seconds is joined
T/2 after its primary at the latest, be that a moment or hours.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.events import Events, Resolved, Rows
from photon.core.clock import Backoff
from photon.core.errors import UnavailableError
from photon.core.fates import (
    DIFFERING_REASONS,
    FATE_OF_VERDICT,
    LETTER_REASONS,
    LETTERS,
    RETRIED,
    VERDICT_OF_REGISTERED,
    Differing,
    Fate,
    Joined,
    Registered,
    Verdict,
)
from photon.core.ids import ID_BYTES
from photon.core.settings import Dispatcher
from photon.core.status import AGE_EDGES_US, BUCKETS, count_latencies
from photon.logs.writer import DeadLetter

Uniform = Callable[[float, float], float]
"""A random.Random's."""

_DOUBLINGS_MAX: Final = 40  # keeps the power small; the cap decides long before


AGE_STEPS: Final = 8
"""Ages are told apart by eighths of an octave: what is about as old and was sent together stays together."""
AGE_JITTER: Final = 0.2
_SLOWEST: Final = 1.2  # what the age brings anyway; it holds where a clock that was set back hides the age


@dataclass(frozen=True, slots=True)
class AgeBackoff:
    """Delays of half the age of an event, from `delay_us_min` to `delay_us_max`."""

    delay_us_min: int
    delay_us_max: int

    def delays_us(
        self, ages_us: npt.NDArray[np.int64], tries: npt.NDArray[np.uint32], uniform: Uniform
    ) -> npt.NDArray[np.int64]:
        """The waits of events that were tried together, after `tries` (1 or more) in vain each.

        One draw for all of them: those of about the same age travel together, other batches at other moments.
        Never more than doubling brings: an old event that was hardly tried, as after a stop, is tried soon.
        """
        doublings = np.minimum(tries, _DOUBLINGS_MAX) - 1.0
        octaves: npt.NDArray[np.float64] = np.log2(np.maximum(ages_us, 1))
        ages = np.exp2(np.floor(octaves * AGE_STEPS) / AGE_STEPS)
        slowest, fastest = self.delay_us_min * _SLOWEST**doublings, self.delay_us_min * 2.0**doublings
        delays = (ages / 2 * (1 - AGE_JITTER * uniform(0.0, 1.0))).clip(slowest, fastest)
        return delays.clip(self.delay_us_min, self.delay_us_max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Backoffs:
    """`absent`: of an event whose primary is not there yet, which may take hours; `failed`: of one whose try
    failed, which mostly is a matter of seconds."""

    absent: AgeBackoff
    failed: Backoff

    @classmethod
    def of(cls, settings: Dispatcher) -> "Backoffs":
        least = settings.retry_delay_ms_min * 1_000
        return cls(
            absent=AgeBackoff(least, max(least, settings.absent_delay_ms_max * 1_000)),
            failed=Backoff(settings.retry_delay_ms_min / 1_000, settings.retry_delay_ms_max / 1_000),
        )

    @property
    def delay_us_max(self) -> int:
        return max(self.absent.delay_us_max, int(self.failed.delay_s_max * 1e6))


COUNTED: Final = tuple(fate for fate in Fate if fate is not Fate.PENDING)


@dataclass(frozen=True, slots=True)
class Totals:
    """All that is counted since the ledger was made. `latencies`, of joined events: from the line read to the
    joined line, counts by core.status.EDGES_US; from the event's own time, by AGE_EDGES_US (paper 4.1).
    `lost_bytes`: of files that were deleted, cut or written anew before they were read. `differing`:
    duplicates that are no plain repetitions (rules/copies); they have dead letters."""

    foreign_events: int
    fates: dict[Fate, int]
    wasted_joins: int
    latencies: list[list[int]]
    lost_bytes: int = 0
    differing: dict[Differing, int] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Events that have no fate yet."""
        return self.foreign_events - sum(self.fates.values())

    def plus(self, other: "Totals") -> "Totals":
        return Totals(
            self.foreign_events + other.foreign_events,
            {fate: self.fates.get(fate, 0) + other.fates.get(fate, 0) for fate in COUNTED},
            self.wasted_joins + other.wasted_joins,
            (np.array(self.latencies) + np.array(other.latencies)).tolist(),
            self.lost_bytes + other.lost_bytes,
            {how: self.differing.get(how, 0) + other.differing.get(how, 0) for how in Differing},
        )


def none_joined() -> npt.NDArray[np.int64]:
    """Totals.latencies of no event, (2, BUCKETS)."""
    return np.zeros((2, BUCKETS), np.int64)


NOTHING: Final = Totals(0, dict.fromkeys(COUNTED, 0), 0, none_joined().tolist())


Verdicts = npt.NDArray[np.uint8]

_VERDICTS: Final = 256


def judge_lookup(registered: bytes, count: int) -> Verdicts:
    """The registry's answer (core.fates.Registered) -> verdicts; SEND where the joiner must decide.

    UnavailableError if it is no answer to `count` events.
    """
    _check(registered, count, max(Registered), f"the registry's answer to a lookup of {count} ids")
    return np.frombuffer(bytearray(registered.translate(VERDICT_OF_REGISTERED)), np.uint8)


def judge_join(outcomes: bytes, ids: bytes) -> Verdicts:
    """The joiner's answer as verdicts. UnavailableError if it is no answer to events of these ids, 16 x N
    bytes. What stands twice and was joined once is a duplicate that no other joiner was needed for."""
    count = len(ids) // ID_BYTES
    said = _check(outcomes, count, max(Joined), f"the joiner's answer to a batch of {count} events")
    if len(lost := np.flatnonzero(said == Joined.DUPLICATE)):
        column = np.frombuffer(ids, f"V{ID_BYTES}")
        said = said.copy()
        said[lost[np.isin(column[lost], column[said == Joined.JOINED])]] = Verdict.REGISTERED
    return said


def _check(column: bytes, count: int, highest: int, what: str) -> Verdicts:
    outcomes = np.frombuffer(column, np.uint8)
    if len(outcomes) != count or outcomes.max(initial=0) > highest:
        raise UnavailableError(f"{what} is not understood; run the same version everywhere")
    return outcomes


def resolve(
    events: Events,
    verdicts: Verdicts,
    reasons: Mapping[int, str],
    backoffs: Backoffs,
    at_us: npt.NDArray[np.int64],
    uniform: Uniform,
    due_us: npt.NDArray[np.int64] | None = None,
    set_by_us: int = 0,
    differing: Mapping[int, Differing] = {},
) -> Resolved:
    """Verdicts -> fates, dead letters and retries. `at_us` (N,): when the verdicts came, by the clock that
    `first_seen` is of; the events' own clock is ahead of that by `set_by_us`.

    `due_us` (N,): of events that were sent before they were due. Where their primaries are not there they
    wait on as if they had not been sent. `differing`: by row, duplicates that differ (Copies.differing).
    """
    counts = np.bincount(verdicts, minlength=_VERDICTS).tolist()
    fates: dict[Fate, int] = {}
    for verdict, fate in FATE_OF_VERDICT.items():
        if counts[verdict]:
            fates[fate] = fates.get(fate, 0) + counts[verdict]
    latencies = none_joined()
    if counts[Joined.JOINED]:
        joined = verdicts == Joined.JOINED
        event_us = np.frombuffer(events.times, "<i8")
        latencies[0] = count_latencies((at_us - events.first_seen)[joined])
        latencies[1] = count_latencies((at_us + set_by_us - event_us)[joined], AGE_EDGES_US)
    retries, next_due_us = _retries(events, verdicts, counts, backoffs, at_us, uniform, due_us)
    assert sum(fates.values()) + (len(retries) if retries else 0) == len(events)
    letters = _letters(events, verdicts, counts, reasons)
    letters += [events.letter(row, Fate.DUPLICATE, DIFFERING_REASONS[how]) for row, how in differing.items()]
    wasted, kinds = counts[Joined.DUPLICATE], dict(Counter(differing.values()))
    return Resolved(fates, wasted, latencies, letters, retries, next_due_us, differing=kinds)


def _letters(
    events: Events, verdicts: Verdicts, counts: list[int], reasons: Mapping[int, str]
) -> list[DeadLetter]:
    dead = [verdict for verdict, fate in FATE_OF_VERDICT.items() if fate in LETTERS and counts[verdict]]
    letters = []
    for row in np.flatnonzero(np.isin(verdicts, dead)).tolist() if dead else ():
        fate = FATE_OF_VERDICT[int(verdicts[row])]
        letters.append(events.letter(row, fate, reasons.get(row) or LETTER_REASONS[fate]))
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
