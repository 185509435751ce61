"""What the last minutes looked like: rates, latencies and backlog of each datacenter. Pure.

Counts of statuses only grow, but for a dispatcher that starts with a new ledger: then the rate is nothing for
one step. Latencies are counts by buckets; those of the status are gathered into fewer, of `EDGES_US`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from photon.cluster.statuses import Sample, Status, whole
from photon.core.fates import Fate

POINTS_MAX: Final = 600
EDGES_US: Final = tuple(round(1000 * 2 ** (step / 2)) for step in range(36))
"""Half octaves from 1 ms to three minutes; what takes longer is in the last."""


COLUMNS: Final = ("joined_per_s", "read_per_s", "wasted", "waiting", "behind", "behind_s", "latencies")
"""Of a step of a datacenter; `latencies`: by EDGES_US, of the events joined in it."""


@dataclass
class History:
    """The newest POINTS_MAX steps. Not for several threads at once."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    _points: dict[str, deque[Status | None]] = field(default_factory=dict)
    _last: dict[str, tuple[float, Status]] = field(default_factory=dict)

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

    def _point(self, name: str, at_s: float, now: Status) -> Status | None:
        before_s, before = self._last.get(name, (at_s, now))
        self._last[name] = at_s, now
        if before["read"] > now["read"] or at_s <= before_s:
            return None
        pairs = zip(now["latencies"], before["latencies"], strict=True)
        return {
            "joined_per_s": (now["joined"] - before["joined"]) / (at_s - before_s),
            "read_per_s": (now["read"] - before["read"]) / (at_s - before_s),
            "wasted": max(0, now["wasted"] - before["wasted"]),
            **{key: now[key] for key in ("waiting", "behind", "behind_s")},
            "latencies": [max(0, a - b) for a, b in pairs],
        }

    def told(self, after_s: float) -> dict[str, Any]:
        """{times, edges_ms, datacenters: {name: {joined_per_s, ...}}} of the steps after that time:
        of each of COLUMNS as many values as there are `times`, None where nothing is known."""
        times = [at for at in self.times if at > after_s]
        old = len(self.times) - len(times)
        return {
            "times": times,
            "edges_ms": [edge / 1000 for edge in EDGES_US],
            "datacenters": {
                name: {
                    key: [None if point is None else point[key] for point in islice(points, old, None)]
                    for key in COLUMNS
                }
                for name, points in sorted(self._points.items())
            },
        }


def counted(dispatchers: Iterable[Status]) -> dict[str, Status]:
    """Of each datacenter what its dispatchers count together."""
    own: dict[str, list[Status]] = {}
    for status in dispatchers:
        own.setdefault(status["datacenter"], []).append(status)
    return {
        row["datacenter"]: {
            "joined": row["fates"].get(Fate.JOINED.value, 0),
            "read": row["foreign_events"],
            "wasted": row["wasted_joins"],
            "waiting": row["pending"],
            "behind": sum(status["backlog"]["events"] for status in own[row["datacenter"]]),
            "behind_s": max(status["backlog"]["seconds"] for status in own[row["datacenter"]]),
            "latencies": gathered([status["latency_us"] for status in own[row["datacenter"]]]),
        }
        for row in whole(chain(*own.values()))
    }


def gathered(histograms: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Counts by EDGES_US, from {edges: upper bounds us, counts, which may be one more or none}."""
    counts = np.zeros(len(EDGES_US), np.int64)
    for histogram in histograms:
        edges, own = np.array(histogram["edges"], float), np.array(histogram["counts"], np.int64)
        places = np.minimum(np.searchsorted(EDGES_US, edges), len(EDGES_US) - 1)
        places = np.append(places, len(EDGES_US) - 1)[: len(own)]
        np.add.at(counts, places, own)
    return tuple(counts.tolist())
