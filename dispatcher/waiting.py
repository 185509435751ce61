"""Batches that wait for a sender, and what becomes of them meanwhile."""

import bisect
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np

from dispatcher.reader import BATCH_BYTES_MAX
from dispatcher.rules.awaited import Awaited
from dispatcher.rules.backlog import Backlog, Found, Look
from dispatcher.rules.events import Batch, FreshBatch, RetryBatch, Rows
from dispatcher.rules.pacing import Pacing
from dispatcher.sender import Answer
from photon.core.columns import split_ids, take_ids
from photon.logs.text import ALL_READ

_ARRIVED_MAX: Final = 1 << 13
"""Arrivals that are remembered: from the answer that an event's primary is absent until it is hedged."""
_AnyBatch = TypeVar("_AnyBatch", FreshBatch, RetryBatch)


@dataclass(frozen=True, slots=True, eq=False)
class Hedged:
    """Some of its events wait for their home datacenters, or it for a batch of which that is so, until `due`
    (monotonic seconds). Others may wait for their primary events meanwhile."""

    due: float
    batch: Batch
    answer: Answer


class Held(NamedTuple):
    """A fresh batch that is held back until its primaries are read, but not beyond `until` (monotonic)."""

    newest_us: int
    number: int
    until: float
    batch: FreshBatch


class Together(NamedTuple):
    """Batches that go in one request."""

    batches: list[Batch]


class Woken(NamedTuple):
    """Hedged batches, and the rows of each whose primary events have arrived."""

    parts: list[tuple[Hedged, Rows]]


class WaitingBatches:
    """Batches that wait for a sender: retries first, then fresh ones, then hedged ones that were released,
    then what of a backlog is left to other datacenters. Before all, events of hedged ones whose primary
    events have arrived: the ledger, which wakes the others, has none of a batch before the hedge is over.
    Of one kind a sender takes all that wait, up to a full batch: where a request takes long, few are sent,
    and no kind waits for long behind another.

    Fresh ones whose primaries the event store has yet to read are held back, and then go by their times.
    Its user bounds it. None waits for long, but for what a backlog leaves to others that are at work on it:
    few are read ahead, and reading goes on only while there is room for more hedged ones.
    """

    def __init__(self, events_max: int, senders: int = 1) -> None:
        """`events_max`: of batches that are taken together; `senders`: of each datacenter."""
        self._events_max = events_max
        self._changed = threading.Condition()
        self._retries: deque[RetryBatch] = deque()
        self._fresh: deque[FreshBatch] = deque()
        self._held: list[Held] = []
        self._read_to_us = ALL_READ
        self._hedged: deque[Hedged] = deque()
        self._released = 0
        self._backlog = Backlog[Hedged](events_max, senders)
        self._now = float("-inf")
        """As `release` was told."""
        self._absent: Awaited[tuple[Hedged, int]] = Awaited(arrived_max=_ARRIVED_MAX)
        self._woken: dict[Hedged, list[int]] = {}
        self._tried = Counter[Hedged]()
        """How many tries are under way."""
        self.woken_events = 0
        """Taken because their primary events had arrived."""
        self._closed = False

    @property
    def held(self) -> int:
        """Fresh batches that are held back."""
        return len(self._held)

    def put(self, batch: Batch, now: float = 0.0, now_us: int = 0) -> None:
        """`now`, `now_us`: of a fresh one, the time by the monotonic clock and by that of its events."""
        with self._changed:
            if isinstance(batch, RetryBatch):
                self._retries.append(batch)
            elif hold_s := Pacing.hold_s(newest_us := batch.events.newest_us, self._read_to_us, now_us):
                self._held.append(Held(newest_us, batch.number, now + hold_s, batch))
                return
            else:
                self._fresh.append(batch)
            self._changed.notify()

    def read_to(self, time_us: int) -> None:
        """About up to this time all primary logs are read. Any thread."""
        with self._changed:
            self._read_to_us = time_us
            self._let_go(lambda one: one.newest_us <= time_us)

    def hedge(self, hedged: Hedged, old: bool = False) -> None:
        """Keep it until it is released; as part of a backlog (`old`), or where it but waits for one to be
        recorded, until `looked` says that it is done. Any thread."""
        with self._changed:
            behind = len(self._backlog) > 0 and not len(hedged.answer.hedged)
            if (old or behind) and not self._closed:
                self._backlog.put(hedged, len(hedged.batch.events), self._now)
            else:
                bisect.insort(self._hedged, hedged, lo=self._released, key=lambda one: one.due)
                self._released += self._closed
            self._await(hedged, hedged.answer.absent)

    def looked(self, look: Look[Hedged], found: Sequence[Found] | None) -> list[Hedged]:
        """What a look has found, batch by batch; None if nobody answered. Those that are done. Any thread."""
        with self._changed:
            done = list[Hedged]()
            if found is None:
                self._backlog.unanswered(look, self._now)
            for hedged in self._backlog.looked(look, found, self._now) if found is not None else ():
                # A try may have left some of it to another datacenter meanwhile.
                if hedged in self._tried or len(hedged.answer.hedged):
                    self._hedged.appendleft(hedged)
                    self._released += 1
                else:
                    self._forget(hedged)
                    done.append(hedged)
            self._close_backlog()
            self._changed.notify_all()
            return done

    def arrive(self, primary_ids: Sequence[bytes]) -> None:
        """These can be found now. Any thread."""
        with self._changed:
            self._wake(self._absent.arrive(primary_ids))

    def tried(self, woken: Woken) -> None:
        """Their answers have the verdicts. Any thread."""
        with self._changed:
            for hedged, rows in woken.parts:
                self._tried -= Counter((hedged,))
                self._await(hedged, np.intersect1d(rows, hedged.answer.absent, assume_unique=True))
            self._changed.notify_all()

    def _await(self, hedged: Hedged, rows: Rows) -> None:
        self._wake(self._absent.add(*_awaited(hedged, rows)))

    def _wake(self, keys: Iterable[tuple[Hedged, int]]) -> None:
        for hedged, row in keys:
            self._woken.setdefault(hedged, []).append(row)
            self._changed.notify()

    @property
    def last_due(self) -> float | None:
        """When the last one of those that are hedged is to be released; None while there is none."""
        with self._changed:
            if self._hedged:
                return self._hedged[-1].due
            return self._now if len(self._backlog) else None

    @property
    def all_read(self) -> bool:
        """Whether all primary logs are read to their ends."""
        return self._read_to_us == ALL_READ

    @property
    def next_due(self) -> float:
        """When to release some; infinity while none waits for that."""
        with self._changed:
            waits = self._released < len(self._hedged)
            due = [self._hedged[self._released].due] if waits else []
            if (look_at := self._backlog.due()) > self._now:
                due.append(look_at)
            return min([*due, *(one.until for one in self._held)], default=float("inf"))

    def release(self, now: float, has_room: bool = True, has_time: bool = False) -> None:
        """Batches that were held or hedged for long enough may be taken; without room for more hedged ones,
        all of these. `has_time`: nothing could be read just now, so there is time for others' events."""
        until = now if has_room else float("inf")
        with self._changed:
            self._now = now
            self._backlog.idle(has_time, now)
            if len(self._backlog) and (has_time or self._backlog.due() <= now):
                self._changed.notify_all()
            before = self._released
            while self._released < len(self._hedged) and self._hedged[self._released].due <= until:
                self._released += 1
            if self._released > before:
                self._changed.notify()
            self._let_go(lambda one: one.until <= now)

    def _let_go(self, over: Callable[[Held], bool]) -> None:
        """By their times; senders are told if there are any."""
        going = sorted(filter(over, self._held))
        if going:
            self._held = [one for one in self._held if not over(one)]
            self._fresh.extend(one.batch for one in going)
            self._changed.notify_all()

    def take(self) -> Together | list[Hedged] | Woken | Look[Hedged] | None:
        """The next to send, or hedged ones, or woken ones: `tried` is to follow, or what to look for:
        `looked` is. None when it is closed and empty, but for what others try."""
        with self._changed:
            while True:
                if self._woken:
                    return self._take_woken()
                if self._retries:
                    return self._take_together(self._retries)
                if self._fresh:
                    return self._take_together(self._fresh)
                taken = self._take_hedged() or self._backlog.next(self._now)
                if taken or self._closed:
                    return taken or None
                self._changed.wait()

    @property
    def _may_take_hedged(self) -> bool:
        return self._released > 0 and self._hedged[0] not in self._tried

    def _take_together(self, waiting: deque[_AnyBatch]) -> Together:
        taken, room = list[Batch](), _Room(self._events_max)
        while waiting and room.takes(len(waiting[0].events), waiting[0].size):
            taken.append(waiting.popleft())
        return Together(taken)

    def _take_woken(self) -> Woken:
        parts, room = list[tuple[Hedged, Rows]](), _Room(self._events_max)
        while self._woken:
            hedged, rows = next(iter(self._woken.items()))
            if not room.takes(len(rows), hedged.batch.size):
                break
            parts.append((hedged, np.sort(np.array(rows, np.intp))))
            del self._woken[hedged]
            self._tried[hedged] += 1
            self.woken_events += len(rows)
        return Woken(parts)

    def _take_hedged(self) -> list[Hedged]:
        taken, room = list[Hedged](), _Room(self._events_max)
        while self._may_take_hedged and room.takes(len((one := self._hedged[0].batch).events), one.size):
            taken.append(hedged := self._hedged.popleft())
            self._released -= 1
            self._forget(hedged)
        return taken

    def _forget(self, hedged: Hedged) -> None:
        """What of it waits for its primary events is the ledger's now."""
        self._woken.pop(hedged, None)
        for key, primary_id in zip(*_awaited(hedged, hedged.answer.absent), strict=True):
            self._absent.drop(key, primary_id)

    def _close_backlog(self) -> None:
        if self._closed:
            self._hedged += self._backlog.clear()
            self._released = len(self._hedged)

    def close(self) -> None:
        """What is hedged or held is released."""
        with self._changed:
            self._closed = True
            self._let_go(lambda _: True)
            self._released = len(self._hedged)
            self._close_backlog()
            self._changed.notify_all()


@dataclass(slots=True)
class _Room:
    """In a request that is being put together. What comes first is always taken."""

    events_max: int
    events: int = 0
    size: int = 0

    def takes(self, events: int, size: int) -> bool:
        is_first = not self.events
        self.events += events
        self.size += size
        return is_first or (self.events <= self.events_max and self.size <= BATCH_BYTES_MAX)


def _awaited(hedged: Hedged, rows: Rows) -> tuple[list[tuple[Hedged, int]], Sequence[bytes]]:
    """These rows as keys, and their primary ids."""
    primary_ids = take_ids(hedged.batch.events.primary_ids, rows)
    return [(hedged, row) for row in rows.tolist()], split_ids(primary_ids)
