"""What became of the lines that were handed in; every one is counted once."""

import threading
from collections import Counter
from dataclasses import dataclass


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
