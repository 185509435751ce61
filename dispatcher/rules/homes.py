"""Which datacenter joins an event at once, and how long the others wait for it. Pure.

All datacenters read all events, and each would do what the others do (the paper's wasted joins, 4.4). So
every event has a home: the datacenter, of those whose joiners hold leases, that scores highest with its id
(rendezvous hashing). The home joins it at once. The others wait for a hedge, ask the
registry, and join what the home has not registered. Nothing needs all to be of one opinion: the registry
decides as always, and where two differ a join is wasted, or comes a hedge later.

Where copies of the logs are far apart, the home may read an event just as another gives it up. So for who
has learned to wait so long the turn passes on with the event's age: after each longest hedge the next in the
order of scores is its home. Who reads it in another's turn waits for its own, and SEEN_S more: by then it
sees what was registered before. (A clock that is wrong makes turns of other times.) What is much older is a
backlog, and keeps its home.

What is learned       of hedged events                        of those that were sent at once for another
--------------------  --------------------------------------  -------------------------------------------
registered            a hit, the hedge a little shorter       a hit: the home is at work
joined here           a miss, the hedge longer                UNWAITED of a miss: nobody waited for the home,
                                                              but what is registered may be a repetition
lost to another       the same                                a hit
anything else         nothing: the home could not join it     nothing
                      either

While a home has more misses than hits, of several answers, it is passed over: its events are sent at once,
but for one batch in PROBE_EVERY. (Not where copies are far apart: the turn passes on anyway.)

The hedge comes to rest where a share of 1 - VISIBLE are misses: at that percentile of the time until a home's
commit is visible here. Events that waited much longer, behind a backlog, say nothing of it; of a backlog no
hedge counts at all (rules/backlog).
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.pacing import LIVE_S
from photon.core.fates import Joined, Verdict
from photon.core.ids import ID_BYTES

HEDGE_S_START: Final = 0.3
"""So short that a home which is not there from the start is passed over, and not taken for one far away."""
HEDGE_S_MIN: Final = 0.02
VISIBLE: Final = 0.99
PROBE_EVERY: Final = 16
SEEN_S: Final = 0.25
"""From when a home begins to join an event until the others see it, over links of a tenth of a second."""
FAR: Final = 0.6
"""Of the longest hedge: who waits that long has copies far apart."""
TURN_S_MIN: Final = 4 * SEEN_S
"""Longest hedges that are shorter make no turns."""
ROUNDS: Final = 4
"""Hedged batches fall due together, so often in a hedge: one lookup for many small ones."""
ANSWER_EVENTS: Final = 8
"""As so many an answer counts at most: who stands still for a moment misses all that one asks about."""
KNOWN_EVENTS: Final = 4 * ANSWER_EVENTS
"""Hits and misses that say enough; then the past counts half as much with each new answer."""

UNWAITED: Final = 0.25

_STEP: Final = 0.05
"""Of the logarithm of the hedge, by a single miss."""
_GROWTH_MAX: Final = 0.4
_SHRINKAGE_MAX: Final = 0.02
"""The same, by one answer of many events."""
_FEW: Final = 8
"""So many misses before a home is passed over."""
_NO_AGES: Final = np.zeros(0)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))

Column = npt.NDArray[np.intp]
"""(N,): of each event the number of its home."""
Mask = npt.NDArray[np.bool_]


def key_of(datacenter: str) -> np.uint64:
    """What an id is scored against."""
    return np.uint64(int.from_bytes(hashlib.blake2b(datacenter.encode(), digest_size=8).digest(), "little"))


def ranks_of(ids: bytes, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """16 x N bytes, the keys (D,) of datacenters -> (N, D): of each event the places in `keys`, the home
    first, and who is it after the others' turns."""
    ranks: npt.NDArray[np.intp] = np.argsort(_scores(ids, keys), axis=1)[:, ::-1]
    return ranks


def _scores(ids: bytes, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    halves = np.frombuffer(ids, "<u8").reshape(-1, 2)
    return _mixed(_mixed(halves[:, 0])[:, None] ^ halves[:, 1, None] ^ keys)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64: ids of one server differ in few bits."""
    bits = bits + _MIX
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits = (bits ^ (bits >> shift)) * multiplier
    return bits ^ (bits >> _SHIFTS[2])


class Homes:
    """As one datacenter, `own`, sees them. Not for several threads at once. Times are seconds. Until it is
    told who holds leases, all are taken to be there.

    `joiners`: address -> datacenter, of all there are; `hedge_s_max`: 0 for events that have no home.
    """

    def __init__(self, own: str, joiners: Mapping[str, str], hedge_s_max: float) -> None:
        self._joiners = joiners
        self._names = [own, *sorted({*joiners.values()} - {own})] if hedge_s_max else [own]
        self._keys = np.array([key_of(name) for name in self._names])
        self._live = np.arange(len(self._names))
        self._hits = [0.0] * len(self._names)
        self._misses = [0.0] * len(self._names)
        self._passed_over = [0] * len(self._names)
        self._hedge_s_max = hedge_s_max
        self.hedge_s = min(HEDGE_S_START, hedge_s_max)

    @property
    def are_several(self) -> bool:
        """Whether there are other datacenters, live or not."""
        return len(self._names) > 1

    @property
    def is_alone(self) -> bool:
        """Whether every event is this datacenter's."""
        return len(self._live) == 1

    def seen(self, holders: Collection[str]) -> None:
        """Addresses of the joiners that hold leases. Who lost its leases is nobody's home."""
        live = {self._joiners[holder] for holder in holders if holder in self._joiners}
        self._live = np.array([n for n, name in enumerate(self._names) if n == 0 or name in live])

    def of(self, ids: bytes) -> Column:
        """16 x N bytes -> each event's home: 0 is this datacenter, the others have other numbers."""
        homes: Column = self._live[_scores(ids, self._keys[self._live]).argmax(axis=1)]
        return homes

    def now(self, ids: bytes, ages_s: npt.NDArray[np.float64]) -> Column:
        """As `of`, for events of these ages (N,): whose turn it is, where copies are far apart; nobody's, -1,
        while what was begun in the turn before may not be seen."""
        if not self.is_far or not (turns := self._turns(ages_s)).any():
            return self.of(ids)
        ranks = ranks_of(ids, self._keys[self._live])
        homes: Column = self._live[ranks[np.arange(len(ranks)), turns % ranks.shape[1]]]
        homes[(turns != 0) & (ages_s - turns * self._hedge_s_max < SEEN_S)] = -1
        return homes

    @property
    def is_far(self) -> bool:
        """Whether copies of the logs are far apart."""
        return self._hedge_s_max >= TURN_S_MIN and self.hedge_s >= FAR * self._hedge_s_max

    def _turns(self, ages_s: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """How many turns are over."""
        turns = np.where(ages_s < LIVE_S, ages_s // self._hedge_s_max, 0)
        return turns.astype(np.intp)

    def inherits(self, ids: bytes) -> Mask:
        """(N,): of which events this datacenter is the home, were their home not there."""
        if self.is_alone:
            return np.zeros(len(ids) // ID_BYTES, np.bool_)
        mask: Mask = ranks_of(ids, self._keys[self._live])[:, 1] == 0
        return mask

    def at_once(self, homes: Column) -> Mask:
        """(N,): whether each is to be sent at once. Asked once of each fresh batch, for one in PROBE_EVERY is
        a probe."""
        mask = ~self.are_others(homes)
        for number in self._live[1:].tolist():
            if self._is_absent(number) and (theirs := homes == number).any():
                self._passed_over[number] = (self._passed_over[number] + 1) % PROBE_EVERY
                if not self._passed_over[number]:
                    mask &= ~theirs
        return mask

    def are_others(self, homes: Column) -> Mask:
        """(N,): whether each is another's, who is not passed over, or nobody's."""
        passed_over = [number for number in self._live[1:].tolist() if self._is_absent(number)]
        mask: Mask = (homes != 0) & ~np.isin(homes, passed_over)
        return mask

    def due(self, now: float, ids: bytes = b"", ages_s: npt.NDArray[np.float64] = _NO_AGES) -> float:
        """When hedged events of these ages, that were read now, are taken up again: the first of them."""
        wait_s, step = self.hedge_s, self.hedge_s / ROUNDS
        if self.is_far and (live := ages_s < LIVE_S).any():
            ranks, turns = ranks_of(ids, self._keys[self._live]), self._turns(ages_s)
            own_in = (np.argmax(ranks == 0, axis=1) - turns) % ranks.shape[1]
            waits_s = ((turns + own_in) * self._hedge_s_max + SEEN_S - ages_s)[live]
            wait_s = float(waits_s[waits_s < waits_s.min() + SEEN_S].max())  # the others wait once more
        return math.ceil((now + wait_s) / step) * step

    def learn(self, homes: Column, verdicts: npt.NDArray[np.uint8], late_s: float | None) -> None:
        """What became of events. `late_s`: how long after its end the hedge was over, None where there was
        none, for they were sent at once."""
        lost = verdicts == Joined.DUPLICATE
        hit, missed = verdicts == Verdict.REGISTERED, (verdicts == Joined.JOINED) | lost
        if late_s is None:
            hit, missed = hit | lost, missed & ~lost
        for number in self._live[1:].tolist():
            theirs = homes == number
            misses = float((missed & theirs).sum()) * (UNWAITED if late_s is None else 1)
            self._learn(number, int((hit & theirs).sum()), misses, late_s)

    def status(self) -> dict[str, Any]:
        """Plain values: who can be a home, who is passed over, how long the others are waited for."""
        live = self._live.tolist()
        return {
            "live": sorted(self._names[number] for number in live),
            "passed_over": sorted(self._names[number] for number in live if self._is_absent(number)),
            "hedge_ms": round(self.hedge_s * 1000, 1),
        }

    def _learn(self, number: int, hits: int, misses: float, late_s: float | None) -> None:
        if not hits and not misses:
            return
        weight = min(1.0, ANSWER_EVENTS / (hits + misses))
        known = self._hits[number] + self._misses[number]
        keep = 0.5 if known >= KNOWN_EVENTS else 1.0
        self._hits[number] = self._hits[number] * keep + hits * weight
        self._misses[number] = self._misses[number] * keep + misses * weight
        if late_s is not None and late_s < self.hedge_s and not self._is_absent(number):
            step = _STEP * (VISIBLE * misses - (1 - VISIBLE) * hits)
            grown = self.hedge_s * math.exp(max(-_SHRINKAGE_MAX, min(step, _GROWTH_MAX)))
            self.hedge_s = min(max(grown, HEDGE_S_MIN), self._hedge_s_max)

    def _is_absent(self, number: int) -> bool:
        return not self.is_far and self._misses[number] > max(_FEW, self._hits[number])
