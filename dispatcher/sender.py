"""Sending one batch until each of its events has a verdict, through failures of the servers below.

While no joiner answers, the batch is held here and sent again: as few batches are in flight, reading stops
(back-pressure) and nothing need be written down. A joiner that fails whenever a certain event comes must
not stop the others: a batch that keeps failing goes on in smaller parts until that event stands alone.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.backlog import Found
from dispatcher.rules.events import Events, Rows, concat
from dispatcher.rules.homes import SEEN_S, Homes
from dispatcher.rules.pacing import LIVE_S, Pacing, is_backlog
from dispatcher.rules.verdicts import Verdicts, judge_join, judge_lookup
from idregistry.client import RegistryClient
from joiner.client import ForeignColumns, JoinerClient
from photon.core.clock import Backoff, SteadyClock
from photon.core.columns import join_lines
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Joined, Verdict

HELD_BACKOFF: Final = Backoff(0.02, 1.0)
CUT_AFTER_FAILURES: Final = 4  # while it was on its way: a joiner may have died of another batch
CUT: Final = 8  # each failure may be a joiner's death: few are to be enough
TELL_AFTER_FAILURES: Final = 6  # about 1 s: a joiner that is just starting is not worth a line
UNDER_WAY_BACKOFF: Final = Backoff(0.01, 0.08)
UNDER_WAY_S: Final = 1.0  # a commit takes a round trip or two; one whose leader is gone may never end
LOOKUP_PAUSE_S: Final = 1.0  # a registry that failed is not asked for so long: batches go on without
LOOK_WHO_S: Final = 1.0  # so often, at most, it is asked which joiners hold leases
STARTING_S: Final = 3.0  # and not before: datacenters that start together are not ready at the same moment
LONG_S: Final = float("inf")  # what was missed after so long says nothing of the hedge
IN_TIME_S: Final = 2 * SEEN_S  # hedged events that wait longer for a sender go, whosever turn it is


AGREEMENT_BACKOFF: Final = Backoff(0.02, 0.25)
AGREEMENT_TELL_AFTER_FAILURES: Final = 8  # about 1 s, as above
_LOOK_S: Final = 0.1  # a thread that waits looks so often whether it is time to stop


class Gate:
    """What the threads of a dispatcher share. Holds them to one pacing: each asks and tells it behind a lock.

    `stopping`: set when it is time to stop.
    """

    def __init__(
        self,
        pacing: Pacing,
        clock: SteadyClock,
        rng: random.Random,
        stopping: threading.Event,
        notice: Callable[[str], None],
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.stopping = stopping
        self.notice = notice
        self._pacing = pacing
        self._changed = threading.Condition()
        self._inside = 0

    @property
    def size(self) -> int:
        return self._pacing.requests_max

    def wait(self, backoff: Backoff, failures: int) -> bool:
        """After so many failures in a row; true when it is time to stop."""
        return self.stopping.wait(backoff.delay_s(failures, self.rng.uniform))

    @contextlib.contextmanager
    def pacing(self) -> Iterator[Pacing]:
        with self._changed:
            yield self._pacing

    def enter(self) -> bool:
        """Wait for room for a request; `request` must follow. False if it was time to stop before."""
        with self._changed:
            while self._inside >= self._pacing.requests_max:
                if self.stopping.is_set():
                    return False
                self._changed.wait(_LOOK_S)
            self._inside += 1
            return True

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Around a request, after `enter`: what becomes of it is learned, and the thread leaves."""
        sent_at = self.clock.monotonic()
        tell = self._pacing.request_answered
        try:
            yield
        except OverloadedError:
            tell = self._pacing.request_refused
            raise
        finally:
            with self._changed:
                self._inside -= 1
                tell(sent_at, self.clock.monotonic())
                self._changed.notify_all()


@dataclass(slots=True)
class Answer:
    """Verdicts (N,) of a batch, when (us, by the gate's clock) each one came, and reasons of some rows."""

    verdicts: Verdicts
    at_us: npt.NDArray[np.int64]
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def hedged(self) -> Rows:
        """The rows that wait for their home datacenter."""
        return np.flatnonzero(self.verdicts == Verdict.HEDGED)

    @property
    def absent(self) -> Rows:
        """The rows whose primary events were not there yet."""
        return np.flatnonzero(self.verdicts == Joined.RETRY_ABSENT)

    def split(self, sizes: Sequence[int]) -> "list[Answer]":
        """Of its first events, of the next, and so on."""
        if len(sizes) == 1:
            return [self]
        parts = [Answer(np.empty(size, np.uint8), np.empty(size, np.int64)) for size in sizes]
        _hand_out(self, ((part, np.arange(len(part.verdicts))) for part in parts))
        return parts


class Sender:
    """Shared by all sending threads."""

    def __init__(
        self,
        registry: RegistryClient | None,
        joiner: JoinerClient,
        gate: Gate,
        is_recovered: Callable[[str], bool],
        recognise: Callable[[], None],
        homes: Homes,
    ) -> None:
        """`registry`: None to send without looking up first. `is_recovered`: whether the file of that name
        holds what recovery released (dispatcher.workers). `recognise`: raises where the registry is not the
        one that this dispatcher knows (RegistryClient.recognise)."""
        self._registry = registry
        self._joiner = joiner
        self._gate = gate
        self._clock = gate.clock
        self._is_recovered = is_recovered
        self._recognise = recognise
        self._lookup_at = self._live_at = float("-inf")
        self._homes = homes
        self._hedges = registry is not None and homes.are_several
        self._mutex = threading.Lock()  # over the homes
        self._asking = threading.Lock()

    @property
    def passes_over(self) -> bool:
        """Some other datacenter registers nothing, and is asked for a few events only."""
        with self._mutex:
            return bool(self._homes.status()["passed_over"])

    @property
    def is_alone(self) -> bool:
        """No other datacenter joins events that are this one's."""
        return not self._hedges or self._homes.is_alone

    def homes(self) -> dict[str, Any]:
        """As Homes.status."""
        with self._mutex:
            return self._homes.status()

    def agree(self) -> bool:
        """Ask, before anything is read, until the registry is known to be the one it was, and until a joiner
        says that it makes the same ids of the same events.

        By other settings all lines may be malformed; they would be passed over before any batch was sent.
        False if it was time to stop before. CorruptStateError for another registry; SettingsMismatchError if
        a joiner refuses.
        """
        return self._told("registry", self._recognise) and self._told("joiner", self._joiner.agree)

    def _told(self, who: str, ask: Callable[[], None]) -> bool:
        failures = 0
        while True:
            try:
                ask()
            except UnavailableError as error:
                failures += 1
                if failures >= AGREEMENT_TELL_AFTER_FAILURES:
                    self._gate.notice(f"{who}: {error}; nothing is read until one answers")
                if self._gate.wait(AGREEMENT_BACKOFF, failures):
                    return False
            else:
                self._live_at = self._clock.monotonic() + STARTING_S
                return True

    def send(self, events: Events) -> Answer | None:
        """Verdicts of all events; None if it was time to stop before anything was known of any. Those that
        another datacenter is to join are HEDGED: `send_hedged` has their verdicts."""
        at_once = self._at_once(events)
        if at_once is None:
            return self._answer(events, self._look_up(events))
        answer = Answer(
            np.full(len(events), Verdict.HEDGED, np.uint8), np.full(len(events), self._clock.now_us())
        )
        if len(at_once):
            sent = events.take(at_once)
            found = self._answer(sent, self._look_up(sent))
            if found is None:
                return None
            self._learn(sent, found, None)
            _hand_out(found, [(answer, at_once)])
        return answer

    def send_again(self, parts: Sequence[tuple[Events, Answer, Rows]]) -> None:
        """These rows of batches once more, in one request; their verdicts stay where it was time to stop."""
        found = self.send(concat([events.take(rows) for events, _, rows in parts]))
        if found is not None:
            _hand_out(found, ((answer, rows) for _, answer, rows in parts))

    def send_hedged(self, batches: Sequence[tuple[Events, Answer]], due: float) -> None:
        """The rest of the verdicts, now that their homes had their time: one lookup, and one request to a
        joiner for what is not registered. `due`: when that time was over; monotonic. What is another's turn
        then stays hedged, unless it waited here for a sender or was taken before its time."""
        late_s = self._clock.monotonic() - due
        events, parts = _hedged(batches)
        if not len(events):
            return
        hedged_us = np.concatenate([answer.at_us[rows] for answer, rows in parts])
        others, ages_s = np.zeros(len(events), np.bool_), self._ages_s(events)
        with self._mutex:
            waited_for = self._homes.now(events.ids, self._ages_s(events, hedged_us))
            if self._homes.is_far and 0 <= late_s < IN_TIME_S and not self._gate.stopping.is_set():
                others = (ages_s < LIVE_S) & self._homes.are_others(self._homes.now(events.ids, ages_s))
        found = self._answer(events, _left(self._asked(events), others))
        if found is None:  # it is time to stop
            found = Answer(
                np.full(len(events), Joined.RETRY_UNAVAILABLE, np.uint8),
                np.full(len(events), self._clock.now_us()),
            )
        if self._may_ask and late_s >= 0:  # or nobody has said what the homes have done in time
            with self._mutex:
                self._homes.learn(waited_for, found.verdicts, late_s)
        _hand_out(found, parts)

    def look(
        self, batches: Sequence[tuple[Events, Answer]], joins: Collection[int], missed: bool
    ) -> list[Found] | None:
        """One lookup for what is hedged, and one request to a joiner for what is not registered and of a home
        in `joins`, unless it is not `missed` and left to another's heir (rules/backlog.Look); the rest stays
        hedged. What was found of each; None if nobody answered."""
        self._see_who_lives()
        events, parts = _hedged(batches)
        with self._mutex:
            homes = self._homes.of(events.ids)
            late = np.isin(homes, [*joins])
            if not missed:
                late &= self._homes.inherits(events.ids)
        verdicts = self._asked(events) if len(events) else None
        if not self._may_ask:
            return None
        if verdicts is not None and (found := self._answer(events, _left(verdicts, ~late))) is not None:
            self._learn(events, found, LONG_S if missed else None)
            _hand_out(found, parts)
        told, start = list[Found](), 0
        for answer, rows in parts:
            now, whose = answer.verdicts[rows], homes[start : start + len(rows)]
            registered = (now == Verdict.REGISTERED) | (now == Joined.DUPLICATE)
            told.append(Found(np.bincount(whose[registered]), np.bincount(whose[now == Verdict.HEDGED])))
            start += len(rows)
        return told

    def due(self, events: Events, answer: Answer) -> float:
        """When what of these events is hedged now is to be sent; monotonic."""
        hedged = events.take(answer.hedged)
        with self._mutex:
            return self._homes.due(self._clock.monotonic(), hedged.ids, self._ages_s(hedged))

    def _ages_s(self, events: Events, at_us: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        """How old they are, or were at `at_us`, by the gate's clock."""
        now_us = self._clock.wall.now_us() if at_us is None else at_us + self._clock.set_by_us
        return (now_us - np.frombuffer(events.times, "<i8")) / 1e6

    def _at_once(self, events: Events) -> Rows | None:
        """The rows to send now; None for all of them, where there is no other datacenter."""
        if not self._hedges:
            return None
        self._see_who_lives()
        if self._homes.is_alone:
            return None
        with self._mutex:
            mask = self._homes.at_once(self._homes.now(events.ids, self._ages_s(events)))
        if recovered := self._recovered(events):  # of these no other datacenter has a line to read
            mask |= [events.name(row) in recovered for row in range(len(events))]
        return np.flatnonzero(mask)

    def _learn(self, events: Events, answer: Answer, late_s: float | None) -> None:
        with self._mutex:
            self._homes.learn(self._homes.of(events.ids), answer.verdicts, late_s)

    def _see_who_lives(self) -> None:
        """Now and then; what was known last holds while the registry does not answer."""
        assert self._registry is not None
        if self._clock.monotonic() < self._live_at or not self._asking.acquire(blocking=False):
            return
        try:
            holders = self._registry.lease_holders()
        except UnavailableError as error:
            self._gate.notice(f"registry: {error}; which datacenters are at work is not known anew")
        else:
            with self._mutex:
                self._homes.seen(holders)
        finally:
            self._live_at = self._clock.monotonic() + LOOK_WHO_S
            self._asking.release()

    def _answer(self, events: Events, verdicts: Verdicts | None) -> Answer | None:
        """All verdicts, where a lookup gave these."""
        if verdicts is None:
            return None
        answer = Answer(verdicts, np.full(len(events), self._clock.now_us()))
        sent = self._send_rows(answer, events, np.flatnonzero(verdicts == Verdict.SEND))
        if not (sent and self._see_what_comes(answer, events)):
            unsent = answer.verdicts == Verdict.SEND
            if unsent.all():
                return None
            # Tried at the next start. What is known of the others, and of later batches, is to be recorded.
            answer.verdicts[unsent | (answer.verdicts == Verdict.UNDER_WAY)] = Joined.RETRY_UNAVAILABLE
        return answer

    def _see_what_comes(self, answer: Answer, events: Events) -> bool:
        """Of what joiners elsewhere are registering: joined here only where that came to nothing (paper 4.4).
        False: stopped."""
        until = self._clock.monotonic() + UNDER_WAY_S
        tries = 0
        while len(rows := np.flatnonzero(answer.verdicts == Verdict.UNDER_WAY)):
            tries += 1
            if self._gate.wait(UNDER_WAY_BACKOFF, tries):
                return False
            verdicts = self._ask(events.take(rows))
            if verdicts is None:
                return False
            if self._clock.monotonic() >= until:
                verdicts[verdicts == Verdict.UNDER_WAY] = Verdict.SEND
            answer.verdicts[rows] = verdicts
            answer.at_us[rows] = self._clock.now_us()
            if not self._send_rows(answer, events, rows[verdicts == Verdict.SEND]):
                return False
        return True

    def _send_rows(self, answer: Answer, events: Events, rows: Rows) -> bool:
        """Through a joiner, in parts if need be, until each has a verdict. False: stopped."""
        if not len(rows):
            return True
        unsent = events.take(rows)
        position, size, failures, strikes = 0, len(rows), 0, 0
        while position < len(rows):
            part = rows[position : position + size]
            if not self._gate.enter():
                return False
            try:
                self._join(answer, part, unsent.take(np.arange(position, position + len(part))))
            except UnavailableError as error:
                failures += 1
                strikes += not isinstance(error, OverloadedError)
                if failures >= TELL_AFTER_FAILURES:
                    self._gate.notice(f"joiner: {error}; sent again until it answers")
                if strikes >= CUT_AFTER_FAILURES:
                    if len(part) == 1:
                        self._gate.notice(
                            f"joiner: {error}; an event that fails alone, too, is tried again later"
                        )
                        answer.verdicts[part] = Joined.RETRY_UNAVAILABLE
                        position += 1
                    size = max(1, len(part) // CUT)
                if self._gate.wait(HELD_BACKOFF, failures):
                    return False
            else:
                position += len(part)
                size = min(2 * size, len(rows))
                failures = 0
        with self._gate.pacing() as pacing:
            in_vain = int(np.count_nonzero(answer.verdicts[rows] == Joined.DUPLICATE))
            pacing.joined_in_vain(in_vain, len(rows))
        return True

    def _look_up(self, events: Events) -> Verdicts | None:
        """Where that pays; all are to be sent where it does not. None: stopped."""
        with self._gate.pacing() as pacing:
            pays = self._may_ask and pacing.lookup_pays()
        if self._may_ask and not self.is_alone:
            # Others hedge no longer for what has waited here, and of a backlog they may be ahead of its home.
            now_us = self._clock.now_us()
            waited_us = now_us - int(events.first_seen.min(initial=now_us))
            is_old = is_backlog(events.newest_us, self._clock.wall.now_us())
            pays |= is_old or waited_us > 1e6 * self._homes.hedge_s or self._homes.is_far
        if not pays:
            return _all_to_send(events)
        verdicts = self._ask(events)
        if verdicts is not None:
            with self._gate.pacing() as pacing:
                pacing.looked_up(int(np.count_nonzero(verdicts != Verdict.SEND)), len(events))
        return verdicts

    def _asked(self, events: Events) -> Verdicts | None:
        return self._ask(events) if self._may_ask else _all_to_send(events)

    @property
    def _may_ask(self) -> bool:
        """There is a registry to ask, and it has not failed just now."""
        return self._registry is not None and self._clock.monotonic() >= self._lookup_at

    def _ask(self, events: Events) -> Verdicts | None:
        """A lookup only saves work: when it fails, the joiner finds the duplicates itself. None: stopped."""
        if self._registry is not None:
            if not self._gate.enter():
                return None
            try:
                with self._gate.request():
                    registered = self._registry.lookup(events.ids, events.times, tell_pending=True)
                return self._doubted(events, judge_lookup(registered, len(events)))
            except UnavailableError as error:
                self._gate.notice(f"registry: {error}; events are sent without looking them up")
                self._lookup_at = self._clock.monotonic() + LOOKUP_PAUSE_S
        return _all_to_send(events)

    def _doubted(self, events: Events, verdicts: Verdicts) -> Verdicts:
        """What recovery released a lagging replica may still have: only a joiner's commit can tell."""
        if recovered := self._recovered(events):
            known = np.flatnonzero(verdicts == Verdict.REGISTERED).tolist()
            rows = [row for row in known if events.name(row) in recovered]
            verdicts[rows] = Verdict.SEND
        return verdicts

    def _recovered(self, events: Events) -> set[str]:
        return {name for name in {*events.names} if self._is_recovered(name)}

    def _join(self, answer: Answer, rows: Rows, part: Events) -> None:
        batch = ForeignColumns(
            ids=part.ids,
            primary_ids=part.primary_ids,
            times=part.times,
            events=join_lines(part.lines),
            tries=part.tries.astype("<u4").tobytes(),
            ages=np.maximum(self._clock.now_us() - part.first_seen, 0).astype("<i8").tobytes(),
        )
        with self._gate.request():
            said = self._joiner.join(batch)
        answer.verdicts[rows] = judge_join(said.outcomes, part.ids)
        answer.at_us[rows] = self._clock.now_us()
        if said.reasons:
            answer.reasons.update((int(rows[row]), reason) for row, reason in said.reasons.items())


def _hedged(batches: Sequence[tuple[Events, Answer]]) -> tuple[Events, list[tuple[Answer, Rows]]]:
    """What is hedged of all, and where in each answer."""
    parts = [(answer, answer.hedged) for _, answer in batches]
    return concat([events.take(rows) for (events, _), (_, rows) in zip(batches, parts, strict=True)]), parts


def _hand_out(found: Answer, to: Iterable[tuple[Answer, Rows]]) -> None:
    """Its rows, one after the other, to those rows of the answers that were asked for together."""
    start = 0
    reasons = deque(sorted(found.reasons.items()))
    for answer, rows in to:
        end = start + len(rows)
        answer.verdicts[rows], answer.at_us[rows] = found.verdicts[start:end], found.at_us[start:end]
        while reasons and reasons[0][0] < end:
            row, reason = reasons.popleft()
            answer.reasons[int(rows[row - start])] = reason
        start = end


def _left(verdicts: Verdicts | None, hedged: npt.NDArray[np.bool_]) -> Verdicts | None:
    """Of what a lookup leaves to be joined this is HEDGED."""
    if verdicts is not None:
        verdicts[hedged & np.isin(verdicts, (Verdict.SEND, Verdict.UNDER_WAY))] = Verdict.HEDGED
    return verdicts


def _all_to_send(events: Events) -> Verdicts:
    return np.full(len(events), Verdict.SEND, np.uint8)
