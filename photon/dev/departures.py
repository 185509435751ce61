"""What the demo's joined departures mean: departures an hour and airport, and the odd days of a year.

The topology reads the joined logs of the run in the directory that PHOTON_DEMO_RUN names.
"""

import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from millwheel import Input, JoinedLogs, LogSink, Stream, Topology, node
from millwheel.ready import WindowCounts, Zeitgeist

RUN: Final = "PHOTON_DEMO_RUN"
NAME: Final = "photon.dev.departures:TOPOLOGY"
_HOUR_US: Final = 3_600_000_000
_DAY_S: Final = 86_400
_LATENESS_S: Final = 14 * _DAY_S


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
                Zeitgeist("odd-days", _DAY_S, learn=28, sigmas=2.5, row=1),
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


def odd_days(run: Path) -> list[str]:
    """The days of 2013 that were told as a spike or a dip, by date."""
    starts = sorted(line["start_us"] for line in _lines(run / "odd-days"))
    days = [datetime.fromtimestamp(start / 1e6, UTC) for start in starts]
    return [f"{day:%b %d}" for day in days if day.year == 2013]


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
