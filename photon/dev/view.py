"""What a person or a script sees of `photon dev` while it runs. Nothing here decides anything.

`look_at` takes the difference of what the processes said some seconds apart; a View shows it.
"""

import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from photon.cluster.statuses import Display, Sample, Status, fates_of, percentiles_ms, whole
from photon.cluster.topology import Topology, process_name
from photon.core.fates import Fate
from photon.core.settings import PIPELINE_ROLES

WINDOW_S: Final = 5.0
"""Rates and latencies are of the last seconds."""
LINE_EVERY_S: Final = 5.0
JSON_EVERY_S: Final = 1.0
Look = Mapping[str, Any]
"""As `look_at` has it."""


class Window:
    """The samples of the last WINDOW_S seconds, and one that is older."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= sample.at_s - WINDOW_S:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        return self._samples[-1].at_s - self._samples[0].at_s

    @property
    def last(self) -> Sample:
        return self._samples[-1]

    def steps(self, process: str) -> Iterator[tuple[Status, Status]]:
        """Each two answers of a process that follow each other."""
        answers = [status for sample in self._samples if (status := sample.statuses.get(process)) is not None]
        return itertools.pairwise(answers)


def look_at(
    topology: Topology, window: Window, seconds: float, phase: str, killed: Sequence[str], restarts: int
) -> dict[str, Any]:
    """One look at the run as plain values, which `--json` prints.

    `window`: of at least one sample; `seconds`: since all was up; `killed`: datacenters that are kept down.
    """
    answered = window.last.answered()
    up = {r.name: said for r in topology.replicas if (said := answered.get(process_name("registry", r.name)))}
    rows = {p.datacenter: _datacenter(topology, window, p.datacenter) for p in topology.pipelines}
    for name, row in rows.items():
        row["state"] = "killed" if name in killed else "starting" if row["silent"] else "up"
    numbers = sorted({row["shard"] for status in up.values() for row in status["shards"]})
    return {
        "seconds": round(seconds, 1),
        "phase": phase,
        "datacenters": rows,
        "shards": [_shard(topology, window, number, up) for number in numbers],
        "replicas": len(topology.replicas),
        "replicas_up": len(up),
        "killed": list(killed),
        "silent": window.last.silent(),
        "restarts": restarts,
    }


def _datacenter(topology: Topology, window: Window, name: str) -> dict[str, Any]:
    """None where nothing is known (yet). Of the window are `latency_ms` {p50, p90, p99}, `joined_per_s`,
    `wasted_ratio` (the share of joins that were in vain) and `cache_hit_ratio`; of all time the others.

    `silent`: its processes that do not answer; `pending`: events that wait to be tried again or are on their
    way; `in_flight`: those read or taken for a retry, and not recorded.
    """
    answered = window.last.answered()
    own = [each for each in topology.processes(*PIPELINE_ROLES) if each.datacenter == name]
    workers = [each.title for each in own if each.role == "dispatcher"]
    sums = ("foreign_events", "pending", "in_flight", "wasted_joins")
    row: dict[str, Any] = {
        "region": topology.regions.get(name, ""),
        "silent": [each.title for each in own if each.title not in answered],
        **dict.fromkeys(("joined", *sums, "wasted_ratio", "cache_hit_ratio")),
        "joined_per_s": 0.0,
        "latency_ms": {},
        "adds_up": True,
    }
    counted = whole(answered[worker] for worker in workers if worker in answered)
    if not counted:
        return row
    (now,) = counted
    steps = [step for worker in workers for step in window.steps(worker)]
    joined = _grown(steps, lambda s: s["fates"][Fate.JOINED.value])
    wasted = _grown(steps, lambda s: s["wasted_joins"])
    cached = [step for each in own if each.role == "eventstore" for step in window.steps(each.title)]
    hits = _grown(cached, lambda s: s["cache"]["hits"])
    misses = _grown(cached, lambda s: s["cache"]["misses"])
    return row | {
        "joined": now["fates"][Fate.JOINED.value],
        "joined_per_s": _per_s(joined, window.seconds),
        **{key: now[key] for key in sums},
        "wasted_ratio": _share(wasted, joined + wasted),
        "cache_hit_ratio": _share(hits, hits + misses),
        "latency_ms": _latency(steps),
        "adds_up": fates_of(now)["adds_up"],
    }


def _latency(steps: Iterable[tuple[Status, Status]]) -> dict[str, float | None]:
    between = []
    for before, after in steps:
        old, new = before["latency_us"], after["latency_us"]
        counts = [b - a for a, b in itertools.zip_longest(old["counts"], new["counts"], fillvalue=0)]
        if min(counts, default=0) >= 0:
            between.append({"edges": new["edges"], "counts": counts})
    return percentiles_ms(between)


def _shard(topology: Topology, window: Window, number: int, up: Mapping[str, Status]) -> dict[str, Any]:
    """`leader`: a replica, None while nobody leads, and the `datacenter` that it is in; `ids`: it holds;
    `events_per_batch`: None where no batch was committed in the window. `up`: what replicas said, by name."""
    rows = {name: row for name, status in up.items() if (row := _row(status, number))}
    # One that was cut off may think that it leads still; the newest term is right.
    leaders = [name for name, row in rows.items() if row["is_leader"] and row["has_quorum"]]
    leader = max(leaders, key=lambda name: rows[name]["term"], default=None)
    steps = [
        (then, now)
        for name in up
        for before, after in window.steps(process_name("registry", name))
        if (then := _row(before, number)) and (now := _row(after, number))
    ]
    batches = _grown(steps, lambda row: row["commits"])
    ids = _grown(steps, lambda row: row["committed_ids"])
    return {
        "shard": number,
        "leader": leader,
        "datacenter": "" if leader is None else topology.replica(leader).datacenter,
        "ids": max((row["ids"] for name, row in rows.items() if leader in (None, name)), default=0),
        "batches_per_s": _per_s(batches, window.seconds),
        "events_per_batch": round(ids / batches, 1) if batches else None,
    }


def _row(status: Status, number: int) -> Status | None:
    return next((row for row in status["shards"] if row["shard"] == number), None)


def _grown(steps: Iterable[tuple[Status, Status]], of: Any) -> int:
    """By how much a count has grown; one that fell began anew, with its process."""
    return sum(of(after) - of(before) if of(after) >= of(before) else of(after) for before, after in steps)


def _per_s(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


class View(Display):
    """Where looks and notices go: JSON lines where asked for; lines in place on a terminal; else plain lines,
    of one look every few seconds, and of the first in each phase."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._due_s, self._phase = 0.0, ""

    def show(self, look: Look) -> None:
        if not self._as_json and sys.stdout.isatty():
            self._update(look)
        elif look["phase"] != self._phase or look["seconds"] >= self._due_s:
            every_s = JSON_EVERY_S if self._as_json else LINE_EVERY_S
            self._due_s, self._phase = look["seconds"] + every_s, look["phase"]
            click.echo(json.dumps(look) if self._as_json else "\n".join(lines_of(look)))

    def _update(self, look: Look) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._in_place is None:
            self._in_place = Live(auto_refresh=False, transient=True)
            self._in_place.start()
        lines = [f"photon dev  {look['seconds']:,.0f} s  {look['phase']}", *lines_of(look)]
        self._in_place.update(Text("\n".join(lines), no_wrap=True), refresh=True)


def lines_of(look: Look) -> list[str]:
    at = f"{look['seconds']:6.1f} s"
    lines = []
    for name, row in look["datacenters"].items():
        latency = "/".join(
            "-" if (ms := row["latency_ms"].get(share)) is None else f"{ms:,.0f}"
            for share in ("p50", "p90", "p99")
        )
        joined_per_s = "-" if row["joined"] is None else f"{row['joined_per_s']:,.0f}"
        share = "" if row["wasted_ratio"] is None else f" ({row['wasted_ratio']:.1%})"
        cached = "-" if row["cache_hit_ratio"] is None else f"{row['cache_hit_ratio']:.1%}"
        lines.append(
            f"{at}  {name:<8} {row['state']:<8}  joined {_number(row['joined'])}  joined/s {joined_per_s}  "
            f"p50/p90/p99 ms {latency}  cache {cached}  wasted {_number(row['wasted_joins'])}{share}  "
            f"waiting {_number(row['pending'])}" + ("" if row["adds_up"] else "  FATES DO NOT ADD UP")
        )
    for shard in look["shards"]:
        where = f" ({shard['datacenter']})" if shard["datacenter"] else ""
        batch = "-" if shard["events_per_batch"] is None else f"{shard['events_per_batch']:,.1f}"
        lines.append(
            f"{at}  shard {shard['shard']}  leader {shard['leader'] or 'NONE'}{where}  ids {shard['ids']:,}  "
            f"batches/s {shard['batches_per_s']:,.0f}  events/batch {batch}"
        )
    parts = [f"replicas {look['replicas_up']}/{look['replicas']}", f"restarts {look['restarts']}"]
    parts += [f"killed: {', '.join(look['killed'])}"] if look["killed"] else []
    parts += [f"down: {', '.join(look['silent'])}"] if look["silent"] else []
    return [*lines, f"{at}  {'  '.join(parts)}"]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
