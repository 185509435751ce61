"""What a server that makes events holds one of: it takes lines from any thread, and threads of its own send.

Nothing is sent twice. Primary events go first: a foreign event waits a little for those that were handed in
before it. An event whose batch failed is left to the log, also when the outcome is unknown: the joiner's
intent takes a batch that was registered to its end, and the dispatcher finds it registered.

The registry's key is an event's id and, with several shards, its time: one that differed from what the log
path makes of the line would be joined twice. So both are made by the same code, from the same bytes.
"""

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from cachetools import TTLCache, cached

from eventstore.client import EventStoreClient
from joiner.client import ForeignColumns, JoinerClient
from photon.core.clock import Backoff, Clock, Pause
from photon.core.columns import join_lines
from photon.core.errors import UnavailableError, UsageError
from photon.core.fates import Joined
from photon.core.settings import Settings, identity_digest, reading_fingerprint
from photon.core.status import Notices
from photon.logs.formats import ForeignBatch, JsonLines, json_lines
from photon.rpc.network import LOOPBACK, Network

PAUSES: Final = Backoff(0.05, 2.0)
"""For how long servers that failed are left alone; what comes meanwhile is left to the log."""
CHECKED_FOR_S: Final = 10.0
"""How long what the joiners said of their settings holds."""
_UNAVAILABLE: Final = bytes([Joined.RETRY_UNAVAILABLE])
_OTHER_SETTINGS: Final = (
    "a joiner reads events by other settings ([primary], [foreign], ids.key, logs.line_bytes_max), so its "
    "ids could be others than these; nothing is sent: give this process the photon.toml of the system"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of the fast path in one process, of each of its two sides, primary and foreign."""

    queue_events_max: int = 10_000
    queue_bytes_max: int = 32 << 20
    """Lines beyond are dropped: the log path has them."""
    batch_events_max: int = 1_024
    batch_bytes_max: int = 4 << 20
    linger_s: float = 0.001
    """How long a line waits for others to share its request."""
    requests_in_flight_max: int = 2
    """Joins; puts go one at a time, in their order."""
    timeout_s: float = 2.0
    """Of a request. What was not answered by then is left to the log."""
    primaries_first_s: float = 0.05
    """A foreign event waits so long for primary events that were handed in before it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"fast path: '{name}' must be above 0, not {getattr(self, name)!r}")


DEFAULT_LIMITS: Final = Limits()


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


_ENDS: Final = ("put", "joined", "duplicate", "left", "malformed", "dropped")
_Counts = TypeVar("_Counts", PrimaryCounts, ForeignCounts)


@dataclass(frozen=True, slots=True)
class Taken:
    """Lines in the order in which they came; `mark` came with the last of them."""

    lines: list[bytes]
    mark: int
    first: int
    """How many lines were taken before these."""


class Side:
    """Events of one kind: a bounded queue of lines from which threads take batches, and what became of each.

    Never makes who offers wait. Several threads may take.
    """

    def __init__(self, limits: Limits, line_bytes_max: int) -> None:
        self._limits = limits
        self._line_bytes_max = line_bytes_max
        self._counts: Counter[str] = Counter()
        self._lines: deque[tuple[bytes, int]] = deque()
        self._bytes = 0
        self._accepted = 0
        self._taken = 0
        self._in_hand: set[int] = set()
        """`first` of what was taken and has not come to its end yet."""
        self._closed = False
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._changed = threading.Condition(lock)

    @property
    def accepted(self) -> int:
        """How many lines were taken in so far."""
        return self._accepted

    def counts(self, kind: type[_Counts]) -> _Counts:
        """Each line that was offered is counted once, those that have not come to their end as `waiting`."""
        with self._filled:
            counts = self._counts.copy()
        names = {field.name for field in dataclasses.fields(kind)} - {"waiting"}
        waiting = counts["offered"] - sum(counts[end] for end in _ENDS)
        return kind(**{name: counts[name] for name in names}, waiting=waiting)

    def offer(self, lines: Iterable[bytes], mark: int) -> None:
        """Take in what there is room for; the rest is dropped."""
        limits, offered = self._limits, list(lines)
        good = usable(offered, self._line_bytes_max)
        with self._filled:
            accepted = 0
            for line in () if self._closed else good:
                if len(self._lines) >= limits.queue_events_max or self._bytes >= limits.queue_bytes_max:
                    break
                self._lines.append((line, mark))
                self._bytes += len(line)
                accepted += 1
            was_empty = len(self._lines) == accepted
            self._accepted += accepted
            malformed, dropped = len(offered) - len(good), len(good) - accepted
            self._counts.update(offered=len(offered), malformed=malformed, dropped=dropped)
            if accepted and (was_empty or self._is_full()):
                self._filled.notify()

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

    def end(self, taken: Taken, became: Mapping[str, int]) -> None:
        """These lines have come to their end: counts by name."""
        with self._changed:
            self._counts.update(became)
            self._in_hand.remove(taken.first)
            self._changed.notify_all()

    def await_ended(self, accepted: int, timeout_s: float) -> bool:
        """Whether the first so many lines have all come to their end in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: min(self._in_hand, default=self._taken) >= accepted, timeout_s
            )

    def close(self) -> None:
        """Take nothing more in and drop what waits."""
        with self._filled:
            self._closed = True
            self._counts.update(dropped=len(self._lines))
            self._taken += len(self._lines)
            self._lines.clear()
            self._bytes = 0
            self._filled.notify_all()
            self._changed.notify_all()

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


_Send = Callable[[Taken, JsonLines], dict[str, int]]


class Sending:
    """Hand lines in with `primary` and `foreign`, from any thread."""

    def __init__(
        self, cache: EventStoreClient, joiner: JoinerClient, settings: Settings, clock: Clock, limits: Limits
    ) -> None:
        self._cache = cache
        self._joiner = joiner
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._notices = Notices("fastpath")
        self._reading = reading_fingerprint(settings)
        kept: TTLCache[Any, bool] = TTLCache(1, CHECKED_FOR_S, clock.monotonic)
        self._read_alike = cached(kept, lock=threading.Lock())(self._ask_readings)
        self._primaries = Side(limits, settings.logs.line_bytes_max)
        self._foreigns = Side(limits, settings.logs.line_bytes_max)
        self._cache_pause = Pause(PAUSES)
        self._joiner_pause = Pause(PAUSES)
        joins = range(limits.requests_in_flight_max)
        self._threads = [self._thread("put", self._primaries, self._put)]
        self._threads += [self._thread(f"join-{n}", self._foreigns, self._join) for n in joins]
        for thread in self._threads:
            thread.start()

    def primary(self, line: bytes) -> None:
        """A primary event whose line is in its log already. Returns at once and never raises."""
        self.primary_many((line,))

    def foreign(self, line: bytes) -> None:
        """A foreign event whose line is in its log already. Returns at once and never raises."""
        self.foreign_many((line,))

    def primary_many(self, lines: Iterable[bytes]) -> None:
        self._primaries.offer(lines, 0)

    def foreign_many(self, lines: Iterable[bytes]) -> None:
        self._foreigns.offer(lines, self._primaries.accepted)

    @property
    def primaries(self) -> PrimaryCounts:
        return self._primaries.counts(PrimaryCounts)

    @property
    def foreigns(self) -> ForeignCounts:
        return self._foreigns.counts(ForeignCounts)

    @property
    def notices(self) -> list[str]:
        """The last that went wrong; it is also in the log `photon.fastpath`."""
        return self._notices.lines()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed in before has come to its end here; whether it has."""
        waits = [(side, side.accepted) for side in (self._primaries, self._foreigns)]
        until = self._clock.monotonic() + timeout_s
        return all(
            side.await_ended(accepted, max(0.0, until - self._clock.monotonic())) for side, accepted in waits
        )

    def close(self, grace_s: float = 1.0) -> None:
        """Send what waits, for so long at most; the rest is dropped. What is handed in later is, too."""
        self.flush(grace_s)
        self._primaries.close()
        self._foreigns.close()
        until = self._clock.monotonic() + self._limits.timeout_s  # by then every request has ended
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock.monotonic()))
        self._cache.close()
        self._joiner.close()

    def _thread(self, name: str, side: Side, send: _Send) -> threading.Thread:
        parser = json_lines(self._settings)

        def run() -> None:
            while (taken := side.take()) is not None:
                side.end(taken, self._end(taken, send, parser))

        return threading.Thread(target=run, name=f"fast-path-{name}", daemon=True)

    def _end(self, taken: Taken, send: _Send, parser: JsonLines) -> dict[str, int]:
        try:
            return send(taken, parser)
        except Exception as error:
            # Not ours to mend, and the thread must go on: the log path has these events.
            self._notices.tell(f"{type(error).__name__}: {error}; left to the log")
            return {"left": len(taken.lines)}

    def _put(self, taken: Taken, parser: JsonLines) -> dict[str, int]:
        if not self._cache_pause.is_over(self._clock.monotonic()):
            return {"left": len(taken.lines)}
        batch = parser.parse_primary(join_lines(taken.lines))
        count, end = len(batch.lines), "left"
        try:
            if self._read_alike():
                self._cache.put(batch.ids, batch.lines)
                self._cache_pause.worked()
                end = "put"
        except UnavailableError as error:
            self._cache_pause.failed(self._clock.monotonic())
            self._notices.tell(f"{error}; left to the log")
        return {end: count, "malformed": len(taken.lines) - count}

    def _join(self, taken: Taken, parser: JsonLines) -> dict[str, int]:
        self._primaries.await_ended(taken.mark, self._limits.primaries_first_s)
        if not self._joiner_pause.is_over(self._clock.monotonic()):
            return {"left": len(taken.lines)}
        batch = parser.parse_foreign(join_lines(taken.lines))
        count, sent = len(batch.lines), 0
        ends = {"left": count}
        try:
            if count and self._read_alike():
                sent = count
                outcomes = self._joiner.join(foreign_columns(batch)).outcomes
                self._pause_after(outcomes)
                ends = ends_of(outcomes, count)
        except UnavailableError as error:
            self._joiner_pause.failed(self._clock.monotonic())
            self._notices.tell(f"{error}; left to the log")
        return {**ends, "malformed": len(taken.lines) - count, "sent": sent}

    def _ask_readings(self) -> bool:
        """Whether all joiners that answer read events by the same settings: a batch may go to any of them.

        UnavailableError if none answers: then it is not known.
        """
        answers = list(self._joiner.statuses().values())
        readings = [answer.get("reading") for answer in answers if not isinstance(answer, UnavailableError)]
        if not readings:
            raise next(answer for answer in answers if isinstance(answer, UnavailableError))
        alike = all(reading == self._reading for reading in readings)
        if not alike:
            self._notices.tell(_OTHER_SETTINGS)
        return alike

    def _pause_after(self, outcomes: bytes) -> None:
        """A joiner that answers, but whose servers do not, is not to be kept busy either."""
        if outcomes.strip(_UNAVAILABLE):
            self._joiner_pause.worked()
        else:
            self._joiner_pause.failed(self._clock.monotonic())


def foreign_columns(batch: ForeignBatch) -> ForeignColumns:
    """Sent for the first time: tries and ages are 0."""
    count = len(batch.lines)
    return ForeignColumns(
        ids=batch.ids,
        primary_ids=batch.primary_ids,
        times=batch.times,
        events=join_lines(batch.lines),
        tries=bytes(4 * count),
        ages=bytes(8 * count),
    )


def usable(lines: Iterable[bytes], line_bytes_max: int) -> list[bytes]:
    """The lines that may be one event each, as a reader of the log would find them, without space around.

    A line that the log path takes for malformed (several lines, one that is too long) must not be joined
    here: it would have two fates.
    """
    kept = []
    for line in lines:
        if type(line) is not bytes or len(line) >= line_bytes_max:
            continue
        bare = line.strip()
        if bare and b"\n" not in bare:
            kept.append(bare)
    return kept


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


class FastPath(Sending):
    """Sends events to the servers of one datacenter. Write an event's line to its log first, then call.

    `eventstores`, `joiners`: their addresses. `settings`: the photon.toml of the system; with another one
    nothing is sent. `network`: TLS, where the servers have it. One for a process, made after the last fork.
    For many threads at once.
    """

    def __init__(
        self,
        eventstores: Sequence[str],
        joiners: Sequence[str],
        settings: Settings,
        clock: Clock,
        limits: Limits = DEFAULT_LIMITS,
        network: Network = LOOPBACK,
    ) -> None:
        """UsageError for addresses that can't be used. Servers that are away are no error."""
        identity = identity_digest(settings)
        joiner = JoinerClient(joiners, limits.timeout_s, network=network, identity=identity)
        store = EventStoreClient(eventstores, limits.timeout_s, network=network)
        super().__init__(store, joiner, settings, clock, limits)

    def __enter__(self) -> "FastPath":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
