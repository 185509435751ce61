"""What a process tells of itself: the last notices, and how long things took.

Histograms have fixed buckets, four to a doubling, so that the counts of all processes add up.
"""

import logging
import threading
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_KEPT: Final = 20


class Notices:
    """Keeps the last few lines; one that says what is already told is not told again."""

    def __init__(self, room: str) -> None:
        """`room` names the log they also go to."""
        self._log = logging.getLogger(f"photon.{room}")
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def tell(self, line: str) -> None:
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        with self._lock:
            if line in self._lines:
                return
            self._lines.append(line)
        self._log.warning("%s", line)

    def lines(self) -> list[str]:
        with self._lock:
            return list(self._lines)


_FINEST_US: Final = 100
_STEPS_PER_DOUBLING: Final = 4
_STEPS: Final = 26 * _STEPS_PER_DOUBLING + 1  # up to 1.9 hours

EDGES_US: Final = np.round(_FINEST_US * 2.0 ** (np.arange(_STEPS) / _STEPS_PER_DOUBLING)).astype(np.int64)
"""Upper edges of the buckets, inclusive; one more bucket counts what is longer."""

AGE_EDGES_US: Final = EDGES_US * 100
"""The same for ages of events, up to eight days."""

BUCKETS: Final = len(EDGES_US) + 1


def count_latencies(
    latencies_us: npt.NDArray[np.int64], edges_us: npt.NDArray[np.int64] = EDGES_US
) -> npt.NDArray[np.int64]:
    """N latencies -> counts of the buckets (BUCKETS,)."""
    buckets = np.searchsorted(edges_us, latencies_us)
    return np.bincount(buckets, minlength=BUCKETS).astype(np.int64)


def no_latencies() -> npt.NDArray[np.int64]:
    return np.zeros(BUCKETS, np.int64)


class Histogram:
    """Counts durations, one call at a time; for many threads at once.

    `finest_us`: upper edge of the first bucket, for what is shorter than EDGES_US can tell.
    """

    def __init__(self, finest_us: float = _FINEST_US) -> None:
        self._edges = EDGES_US * (finest_us / _FINEST_US)
        self._counts = no_latencies()
        self._sum_us = 0.0
        self._lock = threading.Lock()

    def count(self, duration_us: float, times: int = 1) -> None:
        """`times`: how many lasted so long (a batch's events that were answered together)."""
        bucket = int(self._edges.searchsorted(duration_us))
        with self._lock:
            self._counts[bucket] += times
            self._sum_us += duration_us * times

    def status(self) -> dict[str, Any]:
        """{"edges": upper edges in us, "counts": one more than edges, "sum": us of all}."""
        with self._lock:
            return {
                "edges": self._edges.tolist(),
                "counts": self._counts.tolist(),
                "sum": round(self._sum_us),
            }
