"""One request through the joiner (paper 3.3.1): look up, adapt, intend, register, write.

Register before writing: a crash between the two loses a join, which the intent brings back; the other order
would double one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from joiner.adapter import BatchAdapter
from joiner.commit import Resolver, Settler, StorageGate, Unended
from joiner.intents import IntentJournal
from joiner.leases import LeaseKeeper
from joiner.output import JoinedLog
from joiner.ports import Checkpoint, EventStore
from joiner.rules import batch as rules
from joiner.rules.batch import ForeignColumns, JoinOutcomes
from joiner.rules.intent import Intent, Range
from photon.core.clock import Clock
from photon.core.columns import take_ids, take_times
from photon.core.errors import OverloadedError, StorageError, UnavailableError
from photon.core.fates import Committed, Found, Joined
from photon.core.ids import Token

UNRESOLVED_MAX: Final = 64
UNRESOLVED_BYTES_MAX: Final = 256 << 20


class Deadline:
    """Of one request. What waits for it waits no longer; nothing is registered when it is over."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        """None: the caller waits for ever."""
        self._clock = clock
        self._until_s = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """None: for ever."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock.monotonic())

    def check(self) -> None:
        """OverloadedError if it is over: nothing was done."""
        if self._until_s is not None and self._clock.monotonic() >= self._until_s:
            raise OverloadedError(
                "the request's deadline has passed and nothing was registered; send it again"
            )


class CommitSlots:
    """The limit of commits on their way to the IdRegistry (paper 3.3.2): it bounds what a crash leaves.

    For many threads at once.
    """

    def __init__(self, commits_max: int) -> None:
        self._commits_max = commits_max
        self._free = threading.BoundedSemaphore(commits_max)
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def taken(self, timeout_s: float | None) -> Iterator[None]:
        """One of the slots, waited for so long; None: for ever. OverloadedError: nothing was done."""
        if not self._free.acquire(timeout=timeout_s):
            raise OverloadedError(
                f"{self._commits_max} commits are on their way to the IdRegistry and none ended in time; "
                "send again later or raise joiner.commits_in_flight_max"
            )
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
            self._free.release()


class TokenSource:
    """Gives out the tokens of one incarnation (paper 3.3.2). For many threads at once."""

    def __init__(self, address: str, clock: Clock, rng: Random) -> None:
        """`rng` must not be seeded alike in two lives of a joiner: equal tokens would both win."""
        self.incarnation = rng.getrandbits(64)
        self._address = address
        self._clock = clock
        self._last_us = -(1 << 62)
        self._lock = threading.Lock()

    def next(self) -> bytes:
        """A packed token, later than all before it, whatever the clock does."""
        with self._lock:
            self._last_us = max(self._clock.now_us(), self._last_us + 1)
            return Token(self._address, self.incarnation, self._last_us).pack()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the pipeline works with."""

    eventstore: EventStore
    adapter: BatchAdapter
    journal: IntentJournal
    output: JoinedLog
    settler: Settler
    resolver: Resolver
    slots: CommitSlots
    gate: StorageGate
    leases: LeaseKeeper
    tokens: TokenSource
    clock: Clock
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Events with a joined line, each id once: K of the batch's rows (None: all of them)."""

    rows: rules.Rows | None
    ids: bytes
    times: bytes
    lines: bytes
    repeats: dict[int, int]
    """Rows of the batch whose id stands at an earlier candidate -> that one's row."""


class Pipeline:
    """Handles requests, several at a time. It remembers nothing of an event but its intent."""

    def __init__(self, parts: Parts, patience: rules.Patience, requests_in_flight_max: int) -> None:
        self._parts = parts
        self._patience = patience
        self._requests_in_flight_max = requests_in_flight_max
        self._lock = threading.Lock()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. OverloadedError, StorageError: the request was refused, nothing was done.

        `timeout_s`: how long the caller waits, None for ever. Past it nothing more is registered.
        """
        parts = self._parts
        deadline = Deadline(parts.clock, timeout_s)
        with self._admitted():
            try:
                found, primaries = parts.eventstore.lookup(batch.primary_ids, deadline.left_s())
            except UnavailableError:
                return JoinOutcomes(bytes([Joined.RETRY_UNAVAILABLE]) * len(batch), {})
            parts.checkpoint("looked up")
            outcomes, reasons = rules.outcomes_of_lookup(found, batch, parts.clock.now_us(), self._patience)
            candidates = self._adapt(batch, found, primaries, outcomes, reasons)
            if candidates.ids:
                self._place(candidates, self._register(candidates, deadline), outcomes, reasons)
            return JoinOutcomes(outcomes.tobytes(), reasons)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Throttle (paper 3.3.1, 3.3.2): what is in flight or unresolved is what a crash leaves to repair."""
        self._parts.leases.check(self._parts.leases.own)
        resolver = self._parts.resolver
        if resolver.unresolved >= UNRESOLVED_MAX or resolver.unresolved_bytes >= UNRESOLVED_BYTES_MAX:
            raise OverloadedError(
                f"{resolver.unresolved} batches wait for their registration or for the disk; send again later"
            )
        with self._lock:
            if self._in_flight >= self._requests_in_flight_max:
                raise OverloadedError(
                    f"{self._in_flight} requests are in flight; send again later "
                    "or raise joiner.requests_in_flight_max"
                )
            self._in_flight += 1
        try:
            self._parts.gate.check()
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _adapt(
        self,
        batch: ForeignColumns,
        found: bytes,
        primaries: list[bytes],
        outcomes: rules.Outcomes,
        reasons: dict[int, str],
    ) -> _Candidates:
        """Joined lines of the events whose primary was found. Notes what the adapter filters."""
        rows: rules.Rows | None = None
        events = batch.events
        if found.count(Found.FOUND) != len(found):
            mask = np.frombuffer(found, np.uint8) == Found.FOUND
            rows = np.flatnonzero(mask)
            events = rules.take_lines(events, mask)
            primaries = [primaries[row] for row in rows]
        adapted = self._parts.adapter.join(primaries, events)
        if adapted.rows is not None:
            for row, reason in adapted.reasons.items():
                place = row if rows is None else int(rows[row])
                outcomes[place] = Joined.FILTERED
                reasons[place] = reason
            kept = np.asarray(adapted.rows, np.intp)
            rows = kept if rows is None else rows[kept]
        ids, times = batch.ids, batch.times
        if rows is not None:
            ids, times = take_ids(ids, rows), take_times(times, rows)
        return _once_each(_Candidates(rows, ids, times, adapted.lines, {}), len(batch))

    def _register(self, candidates: _Candidates, deadline: Deadline) -> bytes | None:
        """Intend, register, write. K core.fates.Committed; None where the outcome will be known later."""
        parts = self._parts
        batch: Unended | None = None
        settled = False
        try:
            with parts.slots.taken(deadline.left_s()):
                parts.leases.check(parts.leases.own)  # lookup and slot may have taken long
                batch = Unended(self._intend(candidates, deadline), parts.leases.own)
                parts.settler.register(batch)
            committed = parts.settler.finish(batch)
            settled = True
            return committed
        except (UnavailableError, StorageError):
            if batch is None:
                raise
            return None
        finally:
            if batch is not None and not settled:
                parts.resolver.add(batch)

    def _intend(self, candidates: _Candidates, deadline: Deadline) -> Intent:
        parts = self._parts
        deadline.check()
        draft = parts.journal.draft(parts.tokens.next(), candidates.ids, candidates.times, candidates.lines)
        intent: Intent | None = None
        try:
            intent = parts.journal.append(draft, lambda: parts.output.position)
            parts.checkpoint("intent appended")
            parts.journal.sync(intent)
            deadline.check()
        except (StorageError, OverloadedError) as error:
            if isinstance(error, StorageError):
                parts.gate.failed("journal", error, parts.journal.broken)
            if intent is not None:  # nothing is asked of the registry, so nothing is left to end
                parts.journal.done(intent, Range(intent.position.file, 0, 0))
            raise
        parts.gate.worked("journal")
        parts.checkpoint("intent synced")
        return intent

    @staticmethod
    def _place(
        candidates: _Candidates, committed: bytes | None, outcomes: rules.Outcomes, reasons: dict[int, str]
    ) -> None:
        """Put the registry's answers in their rows."""
        rows = slice(None) if candidates.rows is None else candidates.rows
        if committed is None:
            outcomes[rows] = Joined.RETRY_UNAVAILABLE
        else:
            outcomes[rows] = np.frombuffer(rules.outcomes_of_commit(committed), np.uint8)
            if Committed.EXPIRED in committed:
                expired = np.flatnonzero(outcomes == Joined.EXPIRED)
                reasons.update(dict.fromkeys(expired.tolist(), rules.EXPIRED_REASON))
        for row, original in candidates.repeats.items():
            outcomes[row] = rules.outcome_of_repeat(int(outcomes[original]))
            if original in reasons:
                reasons[row] = reasons[original]


def _once_each(candidates: _Candidates, batch_events: int) -> _Candidates:
    """An id can win only once with one token: later candidates of the same id go with the first."""
    repeats = rules.repeated_rows(candidates.ids)
    if not repeats:
        return candidates
    rows = np.arange(batch_events) if candidates.rows is None else candidates.rows
    mask = ~rules.mask_of(list(repeats), len(rows))
    return _Candidates(
        rows[mask],
        take_ids(candidates.ids, mask),
        take_times(candidates.times, mask),
        rules.take_lines(candidates.lines, mask),
        {int(rows[row]): int(rows[original]) for row, original in repeats.items()},
    )
