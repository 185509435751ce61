"""A bounded queue of lines from which threads take batches."""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from photon.fastpath.lines import Limits


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
