"""A bounded queue of lines from which threads take batches."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventstore.client import EventStoreClient
from joiner.client import ForeignColumns, JoinerClient, JoinOutcomes
from photon.core.clock import Backoff, Clock, Pause
from photon.core.errors import UnavailableError
from photon.core.fates import Joined
from photon.core.settings import Settings, identity_digest, reading_fingerprint
from photon.core.status import Notices
from photon.fastpath.lines import EventLines, Limits, usable
from photon.rpc.network import LOOPBACK, Network


@dataclass(frozen=True, slots=True)
class Taken:
    """Lines in the order in which they came; `mark` came with the last of them."""

    lines: list[bytes]
    mark: int
    first: int
    """How many lines were taken before these."""


class WaitingLines:
    """Never makes who offers wait. Several threads may take."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lines: deque[tuple[bytes, int]] = deque()
        self._bytes = 0
        self._accepted = 0
        self._taken = 0
        self._in_hand: set[int] = set()
        """`first` of what was taken and is not handled yet."""
        self._closed = False
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._changed = threading.Condition(lock)

    @property
    def accepted(self) -> int:
        """How many lines were taken in so far."""
        return self._accepted

    def offer(self, lines: Sequence[bytes], mark: int = 0) -> int:
        """How many of the lines, from the first on, were taken in."""
        limits = self._limits
        with self._filled:
            if self._closed:
                return 0
            accepted = 0
            for line in lines:
                if len(self._lines) >= limits.queue_events_max or self._bytes >= limits.queue_bytes_max:
                    break
                self._lines.append((line, mark))
                self._bytes += len(line)
                accepted += 1
            was_empty = len(self._lines) == accepted
            self._accepted += accepted
            if accepted and (was_empty or self._is_full()):
                self._filled.notify()
            return accepted

    def take(self) -> Taken | None:
        """Waits for lines, and then a little for more. None once it is closed and empty."""
        with self._filled:
            while not self._lines:
                if self._closed:
                    return None
                self._filled.wait_for(lambda: self._lines or self._closed)
                # Another thread may have taken them all by then.
                self._filled.wait_for(lambda: self._is_full() or self._closed, self._limits.linger_s)
            taken = self._batch()
            if self._lines:
                self._filled.notify()
            return taken

    def handled(self, taken: Taken) -> None:
        """These lines have come to their end."""
        with self._changed:
            self._in_hand.remove(taken.first)
            self._changed.notify_all()

    def await_handled(self, accepted: int, timeout_s: float) -> bool:
        """Whether the first so many lines have all come to their end in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: min(self._in_hand, default=self._taken) >= accepted, timeout_s
            )

    def close(self) -> int:
        """Take nothing more in and forget what waits; how many those were."""
        with self._filled:
            self._closed = True
            forgotten = len(self._lines)
            self._lines.clear()
            self._bytes = 0
            self._taken += forgotten
            self._filled.notify_all()
            self._changed.notify_all()
            return forgotten

    def _is_full(self) -> bool:
        return (
            len(self._lines) >= self._limits.batch_events_max or self._bytes >= self._limits.batch_bytes_max
        )

    def _batch(self) -> Taken:
        lines: list[bytes] = []
        size, mark, first = 0, 0, self._taken
        while (
            self._lines and len(lines) < self._limits.batch_events_max and size < self._limits.batch_bytes_max
        ):
            line, mark = self._lines.popleft()
            lines.append(line)
            size += len(line)
        self._bytes -= size
        self._taken += len(lines)
        self._in_hand.add(first)
        return Taken(lines, mark, first)


# --- What became of the lines that were handed in; every one is counted once.


@dataclass(frozen=True, slots=True)
class PrimaryCounts:
    """offered = put + left + malformed + dropped + waiting."""

    offered: int
    put: int
    """Sent to the caches."""
    left: int
    """Could not be sent: a server was away, or reads events by other settings."""
    malformed: int
    """No events, or too long; the log path says why."""
    dropped: int
    """The queue was full or the fast path closed."""
    waiting: int


@dataclass(frozen=True, slots=True)
class ForeignCounts:
    """offered = joined + duplicate + left + malformed + dropped + waiting."""

    offered: int
    joined: int
    duplicate: int
    """The log path, or another server, had it registered before."""
    left: int
    """Not joined as far as is known: the log path decides on it."""
    malformed: int
    dropped: int
    waiting: int
    sent: int
    """Those of joined, duplicate and left for which a joiner was asked."""


class Tally:
    """Counts by name, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def primaries(self) -> PrimaryCounts:
        c = self._snapshot()
        ended = c["put"] + c["left"] + c["malformed"] + c["dropped"]
        return PrimaryCounts(
            c["offered"], c["put"], c["left"], c["malformed"], c["dropped"], c["offered"] - ended
        )

    def foreigns(self) -> ForeignCounts:
        c = self._snapshot()
        ended = c["joined"] + c["duplicate"] + c["left"] + c["malformed"] + c["dropped"]
        return ForeignCounts(
            c["offered"],
            c["joined"],
            c["duplicate"],
            c["left"],
            c["malformed"],
            c["dropped"],
            c["offered"] - ended,
            c["sent"],
        )

    def _snapshot(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()


# --- The only door into this room: what a server that makes events holds one of.

# --- What the fast path asks of the rooms below. Their clients fit as they are.


class PrimaryCache(Protocol):
    """The caches of the EventStore (paper 3.4.1)."""

    def put(self, ids: bytes, lines: Sequence[bytes], /) -> None:
        """16 x N ids and N lines without newline; best effort. UnavailableError if it could not."""
        ...

    def close(self) -> None: ...


class Joiner(Protocol):
    """The joiners of a datacenter (paper 3.3). For many threads at once."""

    def join(self, batch: ForeignColumns, /) -> JoinOutcomes:
        """Each event's outcome. OverloadedError: nothing was done. UnavailableError: unknown."""
        ...

    def statuses(self) -> Mapping[str, dict[str, Any] | UnavailableError]:
        """What each joiner says of itself, by address, or why it says nothing."""
        ...

    def close(self) -> None: ...


# --- Whether the joiners read events by the same settings; if not, nothing may be sent to them.

CHECKED_FOR_S: Final = 10.0


class SameReading:
    """For many threads at once; one of them asks."""

    def __init__(
        self,
        fingerprint: str,
        statuses: Callable[[], Mapping[str, dict[str, Any] | UnavailableError]],
        clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._statuses = statuses
        self._clock = clock
        self._notice = notice
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._is_same = False

    def holds(self) -> bool:
        """As of the last seconds, of all that answer: a batch may go to any of them.

        UnavailableError if none answers: then it is not known.
        """
        with self._lock:
            if self._clock.monotonic() < self._asked_at + CHECKED_FOR_S:
                return self._is_same
            self._is_same = self._ask()
            self._asked_at = self._clock.monotonic()
        if not self._is_same:
            self._notice(
                "a joiner reads events by other settings ([primary], [foreign], ids.key, "
                "logs.line_bytes_max), so its ids could be others than these; nothing is sent: "
                "give this process the photon.toml of the system"
            )
        return self._is_same

    def _ask(self) -> bool:
        answers = list(self._statuses().values())
        readings = [answer.get("reading") for answer in answers if not isinstance(answer, UnavailableError)]
        if not readings:
            raise next(answer for answer in answers if isinstance(answer, UnavailableError))
        return all(reading == self._fingerprint for reading in readings)


# --- The threads that send what was handed in, and what they make of the answers. Nothing is sent twice.
#
# Primary events go first: a foreign event waits a little for those that were handed in before it. An event
# whose batch failed is left to the log, also when the outcome is unknown: the joiner's intent takes a batch
# that was registered to its end, and the dispatcher finds it registered.

PAUSES: Final = Backoff(0.05, 2.0)
"""For how long servers that failed are left alone; what comes meanwhile is left to the log."""

_Handle = Callable[[Taken, EventLines], dict[str, int]]

_UNAVAILABLE: Final = bytes([Joined.RETRY_UNAVAILABLE])


class Sending:
    """Hand lines in with `primary` and `foreign`, from any thread."""

    def __init__(
        self, cache: PrimaryCache, joiner: Joiner, settings: Settings, clock: Clock, limits: Limits
    ) -> None:
        self._cache = cache
        self._joiner = joiner
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._notices = Notices("fastpath")
        reading = reading_fingerprint(settings)
        self._same = SameReading(reading, joiner.statuses, clock, self._notices.tell)
        self._primaries = WaitingLines(limits)
        self._foreigns = WaitingLines(limits)
        self._primary_tally = Tally()
        self._foreign_tally = Tally()
        self._cache_pause = Pause(PAUSES)
        self._joiner_pause = Pause(PAUSES)
        put = [self._thread("put", self._primaries, self._put, self._primary_tally)]
        join = [
            self._thread(f"join-{n}", self._foreigns, self._join, self._foreign_tally)
            for n in range(limits.requests_in_flight_max)
        ]
        self._threads = put + join
        for thread in self._threads:
            thread.start()

    def primary(self, line: bytes) -> None:
        """A primary event whose line is in its log already. Returns at once and never raises."""
        self.primary_many((line,))

    def foreign(self, line: bytes) -> None:
        """A foreign event whose line is in its log already. Returns at once and never raises."""
        self.foreign_many((line,))

    def primary_many(self, lines: Iterable[bytes]) -> None:
        """As `primary`, for several."""
        self._offer(lines, self._primaries, self._primary_tally, 0)

    def foreign_many(self, lines: Iterable[bytes]) -> None:
        """As `foreign`, for several."""
        self._offer(lines, self._foreigns, self._foreign_tally, self._primaries.accepted)

    @property
    def primaries(self) -> PrimaryCounts:
        """What became of the primary events so far."""
        return self._primary_tally.primaries()

    @property
    def foreigns(self) -> ForeignCounts:
        """What became of the foreign events so far."""
        return self._foreign_tally.foreigns()

    @property
    def notices(self) -> list[str]:
        """The last that went wrong; it is also in the log `photon.fastpath`."""
        return self._notices.lines()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed in before has come to its end here; whether it has."""
        waits = [(queue, queue.accepted) for queue in (self._primaries, self._foreigns)]
        until = self._clock.monotonic() + timeout_s
        return all(
            queue.await_handled(accepted, max(0.0, until - self._clock.monotonic()))
            for queue, accepted in waits
        )

    def close(self, grace_s: float = 1.0) -> None:
        """Send what waits, for so long at most; the rest is dropped. What is handed in later is, too."""
        self.flush(grace_s)
        self._primary_tally.add(dropped=self._primaries.close())
        self._foreign_tally.add(dropped=self._foreigns.close())
        until = self._clock.monotonic() + self._limits.timeout_s  # by then every request has ended
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.monotonic()))
        self._cache.close()
        self._joiner.close()

    def _offer(self, lines: Iterable[bytes], queue: WaitingLines, tally: Tally, mark: int) -> None:
        offered = list(lines)
        good = usable(offered, self._settings.logs.line_bytes_max)
        malformed = len(offered) - len(good)
        # Counted before a thread may end them, so that no count of what waits is ever below 0.
        tally.add(offered=len(offered), malformed=malformed)
        accepted = queue.offer(good, mark)
        if accepted < len(good):
            tally.add(dropped=len(good) - accepted)

    def _thread(self, name: str, queue: WaitingLines, handle: _Handle, tally: Tally) -> threading.Thread:
        parser = EventLines(self._settings)

        def run() -> None:
            while (taken := queue.take()) is not None:
                tally.add(**self._end(taken, handle, parser))
                queue.handled(taken)

        return threading.Thread(target=run, name=f"fast-path-{name}", daemon=True)

    def _end(self, taken: Taken, handle: _Handle, parser: EventLines) -> dict[str, int]:
        try:
            return handle(taken, parser)
        except Exception as error:
            # Not ours to mend, and the thread must go on: the log path has these events.
            self._notices.tell(f"{type(error).__name__}: {error}; left to the log")
            return {"left": len(taken.lines)}

    def _put(self, taken: Taken, parser: EventLines) -> dict[str, int]:
        """What became of these primary events."""
        if not self._cache_pause.is_over(self._clock.monotonic()):
            return {"left": len(taken.lines)}
        batch = parser.primaries(taken.lines)
        try:
            if not self._same.holds():
                return {"left": len(batch.lines), "malformed": batch.malformed}
            self._cache.put(batch.ids, batch.lines)
        except UnavailableError as error:
            self._cache_pause.failed(self._clock.monotonic())
            self._notices.tell(f"{error}; left to the log")
            return {"left": len(batch.lines), "malformed": batch.malformed}
        self._cache_pause.worked()
        return {"put": len(batch.lines), "malformed": batch.malformed}

    def _join(self, taken: Taken, parser: EventLines) -> dict[str, int]:
        """What became of these foreign events."""
        self._primaries.await_handled(taken.mark, self._limits.primaries_first_s)
        if not self._joiner_pause.is_over(self._clock.monotonic()):
            return {"left": len(taken.lines)}
        batch = parser.foreigns(taken.lines, self._clock.now_us())
        count, malformed, sent = len(batch.columns), batch.malformed, 0
        try:
            if count and self._same.holds():
                sent = count
                outcomes = self._joiner.join(batch.columns).outcomes
                self._pause_after(outcomes)
                return {**ends_of(outcomes, count), "malformed": malformed, "sent": sent}
        except UnavailableError as error:
            self._joiner_pause.failed(self._clock.monotonic())
            self._notices.tell(f"{error}; left to the log")
        return {"left": count, "malformed": malformed, "sent": sent}

    def _pause_after(self, outcomes: bytes) -> None:
        """A joiner that answers, but whose servers do not, is not to be kept busy either."""
        if outcomes.strip(_UNAVAILABLE):
            self._joiner_pause.worked()
        else:
            self._joiner_pause.failed(self._clock.monotonic())


def ends_of(outcomes: bytes, count: int) -> dict[str, int]:
    """A joiner's answer to `count` events as counts. UnavailableError if it is none.

    Only what is registered has come to its end. Fates of events that are not (filtered, expired, unjoinable)
    are the log path's to decide: it writes the dead letter.
    """
    if len(outcomes) != count:
        raise UnavailableError(
            f"the joiner's answer has {len(outcomes)} outcomes for {count} events; "
            "run the same version everywhere"
        )
    joined, duplicate = outcomes.count(Joined.JOINED), outcomes.count(Joined.DUPLICATE)
    return {"joined": joined, "duplicate": duplicate, "left": count - joined - duplicate}


DEFAULT_LIMITS: Final = Limits()


class FastPath(Sending):
    """Sends events to the servers of one datacenter. Write an event's line to its log first, then call.

    `eventstore`: address of its home process. `settings`: the photon.toml of the system; with another one
    nothing is sent. `network`: TLS, where the servers have it. One for a process, made after the last fork.
    For many threads at once.
    """

    def __init__(
        self,
        eventstore: str,
        joiners: Sequence[str],
        settings: Settings,
        clock: Clock,
        limits: Limits = DEFAULT_LIMITS,
        network: Network = LOOPBACK,
    ) -> None:
        """UsageError for addresses that can't be used. Servers that are away are no error."""
        identity = identity_digest(settings)
        joiner = JoinerClient(joiners, limits.timeout_s, network=network, identity=identity)
        store = EventStoreClient(eventstore, limits.timeout_s, network=network)
        super().__init__(store, joiner, settings, clock, limits)

    def __enter__(self) -> "FastPath":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
