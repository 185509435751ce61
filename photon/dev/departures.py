"""What the demo's joined departures mean: departures an hour and airport, and the odd days of a year.

The topology reads the joined logs of the run in the directory that PHOTON_DEMO_RUN names.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from millwheel import Input, JoinedLogs, LogSink, Stream, Topology, node
from millwheel.ready import WindowCounts, Zeitgeist

RUN: Final = "PHOTON_DEMO_RUN"
NAME: Final = "photon.dev.departures:TOPOLOGY"
_HOUR_US: Final = 3_600_000_000
_DAY_S: Final = 86_400
_DAY_US: Final = _DAY_S * 1_000_000
_LATENESS_S: Final = 400 * _DAY_S
"""All of the year: a catch-up joins a month in half a second, and what it tries again comes as late."""
_LEARN: Final = 28
_SIGMAS: Final = 2.5


def _airport(departure: dict[str, Any]) -> str:
    return str(departure["primary_id"])[:3]


def _topology(run: str) -> Topology:
    return Topology(
        injectors={"departures": JoinedLogs(run, lateness_s=_LATENESS_S)},
        computations={
            "hours": node(
                WindowCounts("by-hour", 3_600),
                Input("departures", key=_airport, value=None),
                Stream("by-hour"),
            ),
            "days": node(
                WindowCounts("by-day", _DAY_S),
                Input("departures", key=lambda _: "all", value=None),
                Stream("by-day"),
            ),
            "odd": node(
                Zeitgeist("odd-days", _DAY_S, learn=_LEARN, sigmas=_SIGMAS, row=1),
                Input("by-day"),
                Stream("odd-days"),
            ),
        },
        sinks={name: LogSink(os.path.join(run, name)) for name in ("by-hour", "odd-days")},
    )


TOPOLOGY: Final = _topology(os.environ.get(RUN, "demo-out/run"))


def counted(run: Path) -> Counter[tuple[str, int]]:
    """Departures of each airport and hour (us), as MillWheel told them."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in _lines(run / "by-hour"):
        counts[line["key"], line["start_us"]] += line["count"]
    return counts


def counted_anew(run: Path) -> Counter[tuple[str, int]]:
    """The same from the joined logs, in plain Python."""
    return Counter(
        (_airport(line), line["ts_us"] // _HOUR_US * _HOUR_US)
        for datacenter in sorted((run / "joined").iterdir())
        for line in _lines(datacenter)
    )


def odd_days(run: Path) -> list[tuple[int, str]]:
    """The days that were told as a spike or a dip, by time: the day since 1970 and which of them."""
    return sorted((line["start_us"] // _DAY_US, line["kind"]) for line in _lines(run / "odd-days"))


def odd_days_anew(run: Path) -> list[tuple[int, str]]:
    """The same from the joined logs, in plain Python."""
    days = Counter[int]()
    for (_, start), departures in counted_anew(run).items():
        days[start // _DAY_US] += departures
    return odd_windows(days, _LEARN, _SIGMAS, 1)


def odd_windows(counts: Mapping[int, int], learn: int, sigmas: float, row: int) -> list[tuple[int, str]]:
    """What Zeitgeist tells of a key with these counts by window, computed one window after the other."""
    told = []
    last = max(counts)
    mean = variance = 0.0
    windows = odd = 0
    for window in itertools.count(min(counts)):
        known = windows and (mean > 0.05 or windows < learn)
        if not known:
            if window > last:
                break
            mean, variance, windows, odd = 0.0, 0.0, 0, 0
            if window not in counts:
                continue
        off = counts.get(window, 0) - mean
        bound = sigmas * max(1.0, variance**0.5)
        side = 0 if windows < learn else (off > bound) - (off < -bound)
        odd = odd + side if side * odd > 0 else side
        if side and abs(odd) == row:
            told.append((window, "spike" if side > 0 else "dip"))
        rate = max(1 / (windows + 1), 0.02)
        variance = (1 - rate) * (variance + rate * off * off)
        mean += rate * off
        windows += 1
    return told


def by_date(odd: Iterable[tuple[int, str]]) -> list[str]:
    """Those of 2013, as text."""
    days = [datetime.fromtimestamp(day * _DAY_S, UTC) for day, _ in odd]
    return [f"{day:%b %d}" for day in days if day.year == 2013]


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
