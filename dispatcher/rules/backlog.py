"""Of a backlog, what is left to its home datacenters: when to look for it, and what is joined here. Pure.

All datacenters read a backlog at once and each joins its own events first (rules/homes.py). Nothing of it is
urgent, and how long a home needs tells little of how it gets on: so no hedge says when it has had its time,
but what is found registered. Who has nothing else to do takes from the far end what the home comes to last,
as an idle processor steals work (Blumofe and Leiserson, JACM 1999); where it would meet the home it waits.

A look at the oldest batches finds, of a home     then, of its events in that batch
------------------------------------------------  ---------------------------------------------------------
all registered                                    they are done
some                                              it is at work there: another look in LOOK_S
no more, but some before                          it has passed: the rest is joined here
none                                              it has yet to come: no look beyond this batch for LOOK_S
none, nowhere, for STALLED_S, nothing else to do  it stands still: they are joined here

and while there is nothing else to do, the newest batch's events of homes that have yet to come are joined
here, but not of the NEAR a sender where such a home may be soon. It is waited for twice as long as these
would take here: who is so slow is met only at what it has on its way, a batch a sender.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

LOOK_S: Final = 0.1
STALLED_S: Final = 2.0
NEAR: Final = 2
"""What a sender has on its way, and begins before others see what is stolen."""
BATCH_S_START: Final = 0.1
_WEIGHT: Final = 0.25
_NEVER: Final = float("-inf")
_NOBODY: Final = frozenset[int]()

Counts = npt.NDArray[np.intp]
"""(D,): events by the number of their home (rules/homes.Homes.of); 0 is this datacenter."""
Key = TypeVar("Key", bound=Hashable)
"""Of a batch."""


class Look(NamedTuple, Generic[Key]):
    """See which events of these batches are registered, and join those that are not and of a home in `joins`.

    `missed`: that these are not registered is the home's doing. Else only those are joined that were this
    datacenter's if the home were not there, or two would steal the same.
    """

    batches: list[Key]
    joins: frozenset[int] = _NOBODY
    missed: bool = False


class Found(NamedTuple):
    """Of a batch: events that were found registered, and those that are left."""

    registered: Counts
    left: Counts


@dataclass(slots=True)
class _Left:
    events: int
    put_at: float
    looks: bool = False
    """Just now."""
    again_at: float = _NEVER
    stolen_at: float = _NEVER
    seen: set[int] = field(default_factory=set)
    """Homes of which some was registered, by whomever."""
    behind: frozenset[int] = _NOBODY
    """Homes that had yet to come to it when it was last looked for."""
    over: frozenset[int] = _NOBODY
    """Homes whose rest is to be joined here."""
    stolen: frozenset[int] = _NOBODY
    """Homes for which it was joined, before they came to it."""


class Backlog(Generic[Key]):
    """Batches in the order of the logs. Not for several threads at once. Times are seconds of one clock."""

    def __init__(self, events_max: int, senders: int) -> None:
        """`events_max`: of batches that are looked for together; `senders`: of each datacenter."""
        self._events_max = events_max
        self._senders = senders
        self._batch_s = BATCH_S_START
        """What it takes to join a stolen batch, a moving average."""
        self._idle = False
        self._starved_at = _NEVER
        """Since when there is nothing to do, not even to steal."""
        self._left: dict[Key, _Left] = {}
        self._since = _NEVER
        self._moved_at: dict[int, float] = {}
        self._behind: frozenset[int] = _NOBODY
        """Homes that had yet to come to the oldest batch when it was last looked for."""

    def __len__(self) -> int:
        return len(self._left)

    def put(self, key: Key, events: int, now: float) -> None:
        if not self._left:
            self._since, self._behind = now, _NOBODY
        self._left[key] = _Left(events, now, again_at=now + LOOK_S)

    def idle(self, idle: bool, now: float) -> None:
        """Whether there is nothing else to do."""
        if not idle or not self._idle:
            self._starved_at = now
        self._idle = idle

    def next(self, now: float) -> Look[Key] | None:
        """What to do now; `looked` is to follow."""
        batches: list[Key] = []
        events = 0
        for key, one in self._left.items():
            if one.over and not one.looks:
                one.looks = True
                return Look([key], one.over, True)
            if one.looks or one.again_at > now:
                if one.seen:
                    continue
                break
            events += one.events
            if batches and events > self._events_max:
                break
            batches.append(key)
        for key in batches:
            self._left[key].looks = True
        return Look(batches) if batches else self._steal(now)

    def looked(self, look: Look[Key], found: Sequence[Found], now: float) -> list[Key]:
        """What became of it, batch by batch. The batches of which nothing is left: they are forgotten."""
        done = []
        if not look.joins:
            self._see(look, found, now)
        for key, (registered, left) in zip(look.batches, found, strict=True):
            one = self._left[key]
            moved, lacking = _homes(registered), _homes(left)
            one.looks = False
            if look.joins and not look.missed:
                self._batch_s += _WEIGHT * (now - one.stolen_at - self._batch_s)
            if not lacking:
                done.append(key)
                del self._left[key]
            elif look.joins:
                one.over -= look.joins
            else:
                stay = lacking - moved
                stalled = {home for home in stay if self._stands_still(home, now)}
                one.over = stay & one.seen | stalled | lacking & {0}
                one.again_at = now + LOOK_S
            one.seen |= moved
        return done

    def unanswered(self, look: Look[Key], now: float) -> None:
        """Nobody said what is registered: so it is not known either whose rest is to be joined here."""
        self._since = now
        for key in look.batches:
            one = self._left[key]
            one.looks, one.over, one.again_at = False, _NOBODY, now + LOOK_S

    def _see(self, look: Look[Key], found: Sequence[Found], now: float) -> None:
        """How far the homes have come; of one that has yet to come to a batch, later ones say nothing."""
        told, behind = dict(zip(look.batches, found, strict=True)), set[int]()
        for key, one in self._left.items():
            if key in told:
                registered, left = map(_homes, told[key])
                moved = registered - behind
                self._moved_at.update(dict.fromkeys(moved, now))
                self._behind -= moved
                one.behind = left - registered
            behind |= one.behind - one.seen
            if key == look.batches[-1]:
                break
        self._behind |= behind

    def due(self) -> float:
        """When to look; infinity while nothing is to be looked for."""
        due = float("inf")
        for one in self._left.values():
            if not one.looks:
                due = min(due, _NEVER if one.over else one.again_at)
            if not one.seen:
                break
        return due

    def clear(self) -> list[Key]:
        """All there are, but for those that somebody looks for: these `looked` gives back no more."""
        kept = {key: one for key, one in self._left.items() if one.looks}
        cleared = [key for key in self._left if key not in kept]
        self._left = kept
        return cleared

    def _steal(self, now: float) -> Look[Key] | None:
        if not self._idle:
            return None
        ahead = [
            key
            for key, one in self._left.items()
            if now - one.put_at > 2 * LOOK_S and not self._behind <= one.seen | one.stolen
        ]
        is_patient = now - self._starved_at < 2 * len(ahead) * self._batch_s / self._senders
        near = self._senders * (NEAR if is_patient else 1)
        if len(ahead) <= near or (one := self._left[ahead[-1]]).looks:
            return None
        if is_patient:
            self._starved_at = now
        one.stolen_at = now
        one.looks = True
        one.stolen |= self._behind
        return Look([ahead[-1]], self._behind)

    def _stands_still(self, home: int, now: float) -> bool:
        moved_at = max(self._since, self._moved_at.get(home, _NEVER))
        return self._idle and now - moved_at >= STALLED_S


def _homes(events: Counts) -> frozenset[int]:
    return frozenset(np.flatnonzero(events).tolist())
