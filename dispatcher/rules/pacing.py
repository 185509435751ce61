"""When to read, to send and to try again (paper 3.2.1, 3.2.2): what is told, and what follows. Pure.

What is told          while                           effect
--------------------  ------------------------------  -------------------------------------------------------
read                  always                          under way: one batch more, unanswered
answered              always                          it needs its sender no more, recorded or not
recorded              always                          under way: one batch less
resolved              most fresh events wait again    BEHIND: reading waits for the primaries, but for a probe
taken, retry_recorded always                          under way: one batch of retries more, less
hedged                always                          it counts among the hedged ones, not those under way
hedged_recorded       always                          hedged: less by it
retried               some wait once more             retries pause, VAIN_RETRY_S for each
                      most have joined                twice as many may be tried before their time
                      before its time, in vain        no such try for a while, twice as long each time
                      before its time, some joined    such tries follow at once again
request_answered      soon                            one request more with each window of answers
                      after SLOW_S                    as request_refused
request_refused       sent after the last cut         half as many requests
                      sent before it                  nothing: it says nothing of the cut's effect
looked_up             few were known                  1 batch in PROBE_EVERY is looked up
                      PAYS_FROM or more were known    each is looked up
joined_in_vain        PAYS_FROM or more               each is looked up, at once

What is asked         answer
--------------------  ----------------------------------------------------------------------------------------
may_read              AHEAD: enough is under way, hedged or held. FULL: no more events may wait. BEHIND, while
                      primary events are still to be read: what waits for others is parked. Else READ
has_room_to_hedge     whether hedged events may wait for their time: else they are taken up now
may_retry, wait_s     whether, and in how many seconds, due retries may be sent
may_wake              whether woken ones may: each sender can take one, whatever else is under way
early                 how many may be tried before their time
hold_s                how long a fresh batch is held back at most: until its primaries are read
lookup_pays           whether to look this batch up
requests_max          how many requests may be on their way, at least 1

Not for several threads at once. Times are seconds of one clock.
"""

import enum
from typing import Final

PER_SENDER: Final = 12
"""Large batches read ahead for each sender: the more to choose from, the fewer joins are wasted."""
SMALL: Final = 2
"""Small ones: one on its way to the registry, one on its way to the disk. A batch of 200 lines costs as much
as one of 2,000: what is written while these are on their way makes the next one larger."""
PATIENCE_S: Final = 0.05
"""If nothing comes back for so long (a distant registry, a poison event), more are read, but no more than the
senders can take."""
CATCHING_UP_EVENTS: Final = 16_384
"""So many waiting retries are a few batches: enough to see progress."""
MOSTLY: Final = 0.75
PROBE_INTERVAL_S: Final = 0.5
"""Nothing else than a batch now and then tells that new events would fare better."""
HEDGED_BYTES_MAX: Final = 64 << 20
"""Of lines that wait in memory for their home; as many events may as large batches are read ahead."""
HELD_A_SENDER: Final = 2
"""Batches that are held at a time, before reading waits for the event store."""
HELD_S_MAX: Final = 2.0
"""However far behind the event store is."""
LIVE_S: Final = 60.0
"""Younger events are no backlog: while an old log is read, what is new can be found all the same."""
VAIN_RETRY_S: Final = 30e-6
"""What a retry in vain costs everybody, several times over."""
VAIN_JOINED: Final = 0.1
"""Fewer of a batch joined than that: it came too early."""
PAUSE_S_MIN: Final = 0.25
PAUSE_S_MAX: Final = 600.0
"""An event may be early by hours while all others join within moments."""
SLOW_S: Final = 2.0
"""An answer that took so long counts as a sign of overload; one takes tens of milliseconds as a rule."""
PAYS_FROM: Final = 0.03
"""The share of known events from which each batch asks. So much may be wasted: the paper's wasted joins are
below 5 % (4.4). By CPU alone a lookup, a tenth of a join, would pay from a tenth."""
PROBE_EVERY: Final = 16
"""While it does not pay, one batch in so many asks all the same, to notice when that changes."""

_SMALL_SHARE: Final = 4  # of a full batch, by events and by bytes
_MEMORY: Final = 0.5  # how much of the past a new batch of fresh events leaves
_ENOUGH_EVENTS: Final = 64  # fewer say nothing of the rest: small batches add up
_DOUBLINGS_MAX: Final = 20  # keeps the power small; PAUSE_S_MAX decides long before
_WEIGHT: Final = 0.25  # of the newest lookup in the moving average
_NEVER: Final = float("-inf")


def is_backlog(newest_us: int, now_us: int) -> bool:
    """Whether nothing of a batch, the latest of whose times is given, is urgent."""
    return newest_us < now_us - LIVE_S * 1e6


class Reading(enum.Enum):
    """Whether one more fresh batch may be read, and why not."""

    READ = enum.auto()
    AHEAD = enum.auto()
    FULL = enum.auto()
    BEHIND = enum.auto()


class Pacing:
    """`senders`: requests at a time at most; `events_max`, `bytes_max`: of a full batch, what reaches either
    is full."""

    def __init__(self, senders: int, events_max: int, bytes_max: int) -> None:
        self._senders = senders
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._bytes = self._unanswered = 0
        self._moved_at = _NEVER
        self.fresh_batches = self.fresh_events = 0
        self.retry_batches = self.retry_events = self._woken_batches = 0
        """Under way: read, or taken for a retry, and not recorded."""
        self.hedged_events = self._hedged_bytes = 0
        """Read or taken for a retry, left to their home for a while, and not recorded."""
        self._resolved = self._again = 0.0
        self._probe_at = self._retry_at = _NEVER
        self._early = self._vain = 0
        self._early_at = _NEVER
        self._window = float(senders)
        self._cut_at = _NEVER
        self._known = 1.0  # until told otherwise
        self._skipped = 0

    # Fresh batches.

    def read(self, events: int, size: int, now: float) -> None:
        """One of so many events and bytes."""
        self._unanswered += 1
        self._move(1, events, size, now)

    def answered(self) -> None:
        self._unanswered -= 1

    def recorded(self, events: int, size: int, now: float) -> None:
        self._move(-1, -events, -size, now)

    def resolved(self, events: int, again: int) -> None:
        """Of one's events so many must be tried again."""
        keep = _MEMORY if self._resolved >= _ENOUGH_EVENTS else 1.0
        self._resolved = self._resolved * keep + events
        self._again = self._again * keep + again

    def may_read(
        self, waiting: int, now: float, held: int = 0, full: bool = False, all_read: bool = False
    ) -> Reading:
        """`waiting`: events that wait for a retry, and whether these are as many as may be (`full`); `held`:
        batches that are held back; `all_read`: the event store has read all primary logs to their ends. READ
        while behind is the probe: the next one waits."""
        if not self._room(now) or held >= HELD_A_SENDER * self._senders:
            return Reading.AHEAD
        if full:
            return Reading.FULL
        if not all_read and waiting >= CATCHING_UP_EVENTS and self._again > MOSTLY * self._resolved:
            if now < self._probe_at:
                return Reading.BEHIND
            self._probe_at = now + PROBE_INTERVAL_S
        return Reading.READ

    @staticmethod
    def hold_s(newest_us: int, read_to_us: int, now_us: int) -> float:
        """`newest_us`: of the batch; `read_to_us`: about up to where the primary logs are read."""
        is_early = read_to_us < newest_us and is_backlog(newest_us, now_us)
        return HELD_S_MAX if is_early else 0.0

    # Retries.

    def taken(self, events: int, woken: bool = False) -> None:
        self.retry_batches += 1
        self.retry_events += events
        self._woken_batches += woken

    def retry_recorded(self, events: int, woken: bool = False) -> None:
        self.retry_batches -= 1
        self.retry_events -= events
        self._woken_batches -= woken

    def retried(self, events: int, again: int, early: bool, now: float) -> None:
        """Of a batch so many must be tried once more. `early`: it was sent before its time."""
        self._retry_at = max(self._retry_at, now) + again * VAIN_RETRY_S
        if 2 * again < events:
            self._early = min(2 * events, self._events_max)
        if not early or not events:
            return
        if events - again >= VAIN_JOINED * events:
            self._vain = 0
        else:
            doublings = min(self._vain, _DOUBLINGS_MAX)
            self._vain += 1
            self._early_at = now + min(PAUSE_S_MAX, PAUSE_S_MIN * 2**doublings)

    def may_retry(self, now: float) -> bool:
        return self.wait_s(now) == 0

    def wait_s(self, now: float) -> float | None:
        """None: not before some are recorded."""
        if self.retry_batches - self._woken_batches >= max(1, self._senders // 2):
            return None
        return max(0.0, self._retry_at - now)

    def may_wake(self) -> bool:
        return self._woken_batches < self._senders

    def early(self, now: float) -> int:
        """Asked once: then 0, until more have joined."""
        if now < self._early_at:
            return 0
        early, self._early = self._early, 0
        return early

    # Hedged batches.

    def hedged(self, events: int, size: int) -> None:
        """One that was under way, of lines of `size` bytes, waits: `recorded` or `retry_recorded` as well."""
        self.hedged_events += events
        self._hedged_bytes += size

    def hedged_recorded(self, events: int, size: int) -> None:
        self.hedged(-events, -size)

    @property
    def has_room_to_hedge(self) -> bool:
        few = self.hedged_events < PER_SENDER * self._senders * self._events_max
        return few and self._hedged_bytes < HEDGED_BYTES_MAX

    # Requests to joiners and the registry.

    @property
    def requests_max(self) -> int:
        return int(self._window)

    def request_answered(self, sent_at: float, now: float) -> None:
        if now - sent_at > SLOW_S:
            self.request_refused(sent_at, now)
        else:
            self._window = min(float(self._senders), self._window + 1 / self._window)

    def request_refused(self, sent_at: float, now: float) -> None:
        if sent_at > self._cut_at:
            self._window = max(1.0, self._window / 2)
            self._cut_at = now

    # Lookups.

    def lookup_pays(self) -> bool:
        if self._known >= PAYS_FROM or self._skipped + 1 >= PROBE_EVERY:
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def looked_up(self, known: int, events: int) -> None:
        """Of so many events that were asked for, `known` had been registered."""
        if events:
            self._known += _WEIGHT * (known / events - self._known)
        self.joined_in_vain(known, events)

    def joined_in_vain(self, in_vain: int, events: int) -> None:
        """Of so many events that were sent, `in_vain` had been registered: a lookup would have told."""
        if events and in_vain >= PAYS_FROM * events:
            self._known = max(self._known, PAYS_FROM)  # no waiting for the average

    def _room(self, now: float) -> bool:
        if self.fresh_batches >= PER_SENDER * self._senders or not self.has_room_to_hedge:
            return False
        enough = max(1, self.fresh_batches) / _SMALL_SHARE
        small = self.fresh_events < enough * self._events_max and self._bytes < enough * self._bytes_max
        if not small or self.fresh_batches < SMALL:
            return True
        return self._unanswered <= self._senders and now - self._moved_at >= PATIENCE_S

    def _move(self, batches: int, events: int, size: int, now: float) -> None:
        self.fresh_batches += batches
        self.fresh_events += events
        self._bytes += size
        self._moved_at = now
