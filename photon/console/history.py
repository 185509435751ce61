"""What the last minutes looked like: rates, latencies and backlog of each datacenter. Pure.

Counts of statuses only grow, but for a dispatcher that starts with a new ledger: then the rate is nothing for
one step. Latencies are counts by buckets; those of the status are gathered into fewer, of `EDGES_US`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from photon.cluster.statuses import Sample, Status, whole
from photon.core.fates import Fate

POINTS_MAX: Final = 600
EDGES_US: Final = tuple(round(1000 * 2 ** (step / 2)) for step in range(36))
"""Half octaves from 1 ms to three minutes; what takes longer is in the last."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a datacenter has counted so far."""

    joined: int
    read: int
    wasted: int
    waiting: int
    behind: int
    behind_s: float
    latencies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a datacenter. `latencies`: by EDGES_US, of the events joined in it."""

    joined_per_s: float
    read_per_s: float
    wasted: int
    waiting: int
    behind: int
    behind_s: float
    latencies: Sequence[int]


@dataclass
class History:
    """The newest POINTS_MAX steps. Not for several threads at once."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    _points: dict[str, deque[Point | None]] = field(default_factory=dict)
    _last: dict[str, tuple[float, _Counted]] = field(default_factory=dict)

    def add(self, sample: Sample, time_s: float) -> None:
        """`time_s`: of the wall clock, for whom it is shown to."""
        self.times.append(time_s)
        seen = counted(sample.of("dispatcher"))
        for name in {*self._points, *seen}:
            points = self._points.setdefault(name, deque(maxlen=POINTS_MAX))
            while len(points) < len(self.times) - 1:
                points.append(None)
            now = seen.get(name)
            points.append(None if now is None else self._point(name, sample.at_s, now))

    def _point(self, name: str, at_s: float, now: _Counted) -> Point | None:
        last = self._last.get(name)
        self._last[name] = at_s, now
        if last is None or last[1].read > now.read or at_s <= last[0]:
            return None
        seconds, before = at_s - last[0], last[1]
        return Point(
            (now.joined - before.joined) / seconds,
            (now.read - before.read) / seconds,
            max(0, now.wasted - before.wasted),
            now.waiting,
            now.behind,
            now.behind_s,
            [max(0, a - b) for a, b in zip(now.latencies, before.latencies, strict=True)],
        )

    def told(self, after_s: float) -> dict[str, Any]:
        """{times, edges_ms, datacenters: {name: {joined_per_s, ...}}} of the steps after that time:
        of each field of a Point a column of as many values as `times`, None where nothing is known."""
        times = [at for at in self.times if at > after_s]
        return {
            "times": times,
            "edges_ms": [edge / 1000 for edge in EDGES_US],
            "datacenters": {
                name: _columns(list(points)[len(points) - len(times) :])
                for name, points in sorted(self._points.items())
            },
        }


def _columns(points: Sequence[Point | None]) -> dict[str, list[Any]]:
    return {
        key: [None if point is None else getattr(point, key) for point in points] for key in Point.__slots__
    }


def counted(dispatchers: Iterable[Status]) -> dict[str, _Counted]:
    """Of each datacenter what its dispatchers count together."""
    dispatchers = list(dispatchers)
    found = {}
    for row in whole(dispatchers):
        name = row["datacenter"]
        own = [status for status in dispatchers if status["datacenter"] == name]
        found[name] = _Counted(
            row["fates"].get(Fate.JOINED.value, 0),
            row["foreign_events"],
            row["wasted_joins"],
            row["pending"],
            sum(status["backlog"]["events"] for status in own),
            max(status["backlog"]["seconds"] for status in own),
            gathered([status["latency_us"] for status in own]),
        )
    return found


def gathered(histograms: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Counts by EDGES_US, from {edges: upper bounds us, counts, which may be one more or none}."""
    counts = np.zeros(len(EDGES_US), np.int64)
    for histogram in histograms:
        edges, own = np.array(histogram["edges"], float), np.array(histogram["counts"], np.int64)
        places = np.minimum(np.searchsorted(EDGES_US, edges), len(EDGES_US) - 1)
        places = np.append(places, len(EDGES_US) - 1)[: len(own)]
        np.add.at(counts, places, own)
    return tuple(counts.tolist())
