"""What each page tells, as plain values."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Final

from dispatcher.client import DispatcherClient
from photon.cluster.dead_letters import FATES, Filter, count_letters, read_letters
from photon.cluster.explain import Asked, explain, joined_lines
from photon.cluster.explain import verdict as verdict_on_event
from photon.cluster.statuses import Sample, Status
from photon.cluster.told import groups_of, line_of, verdict
from photon.cluster.topology import Pipeline, Topology
from photon.console.history import History
from photon.console.index import JoinedIndex
from photon.core.columns import unpack_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.fates import Fate
from photon.logs.formats import json_lines

Query = Mapping[str, str]
Act = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""What is asked for -> what came of it. UsageError for a request that can't be."""

LETTERS_A_PAGE: Final = 50
WAITING_SHOWN: Final = 200
LINE_CHARS_MAX: Final = 4000
_TIMEOUT_S: Final = 5.0
_AGE_EDGES_S: Final = (1, 10, 60, 600, 3600, 86_400)
_TRIES_EDGES: Final = (1, 3, 10, 30)


@dataclass(frozen=True, slots=True)
class Beside:
    """What a console shows and does beside what statuses tell. `acts`: what it may be asked to do, by name;
    `millwheel`: asks a run of it (photon.cluster.wheels.ask); `down`: datacenters that are out, and how;
    `links`: {between, state} of each link between two; `checks`: {ok, text} of what was checked lately."""

    acts: Mapping[str, Act] = field(default_factory=dict)
    millwheel: Callable[..., Mapping[str, Any]] | None = None
    down: Callable[[], Mapping[str, str]] = dict
    links: Callable[[], list[dict[str, Any]]] = list
    checks: Callable[[], list[dict[str, Any]]] = list


class Pages:
    """Thread-safe. `add` is told of each sample."""

    def __init__(self, topology: Topology, index: JoinedIndex | None, beside: Beside) -> None:
        self._topology = topology
        self._index = index
        self._beside = beside
        self._lock = Lock()
        self._history = History()
        self._sample: Sample | None = None
        self._why_silent: Mapping[str, str] = {}
        self._letters: dict[Path, tuple[object, list[dict[str, Any]]]] = {}

    def add(self, sample: Sample, why_silent: Mapping[str, str]) -> None:
        """What all processes have just said."""
        with self._lock:
            self._history.add(sample, time.time())
            self._sample, self._why_silent = sample, dict(why_silent)

    def _look(self) -> Sample:
        with self._lock:
            sample = self._sample
        if sample is None:
            raise UnavailableError("no process was asked yet; again in a moment")
        return sample

    def now(self, query: Query) -> dict[str, Any]:
        """{verdict, well, fates, history, processes, datacenters, links, checks, acts}; of the history
        what is after ?after, in seconds since 1970."""
        sample = self._look()
        said = verdict(sample)
        with self._lock:
            history = self._history.told(_number(query.get("after", "")))
            why = dict(self._why_silent)
        down = self._beside.down()
        return {
            "verdict": said,
            "well": said.startswith("all well"),
            "fates": sample.fates(),
            "history": history,
            "processes": {
                name: f"does not answer ({why.get(name, 'no answer yet')})"
                if status is None
                else line_of(status)
                for name, status in sample.statuses.items()
            },
            "datacenters": {name: down.get(name, "up") for name in self._topology.datacenters},
            "links": self._beside.links(),
            "checks": self._beside.checks(),
            "acts": list(self._beside.acts),
        }

    def event(self, query: Query) -> dict[str, Any]:
        """As photon.cluster.explain, and {fate, timeline, seconds}; {} without an `id`."""
        event_id = query.get("id", "").strip()
        if not event_id:
            return {"index": None if self._index is None else self._index.status()}
        began = time.monotonic()
        told = explain(self._topology, event_id, query.get("primary_id") or None, find_joined=self._find)
        told |= summed_up(told, self._own_time(told))
        return {**told, "seconds": round(time.monotonic() - began, 4)}

    def _own_time(self, told: Mapping[str, Any]) -> int | None:
        """What the event says of its time, us."""
        lines = [row["line"] for row in told["joined"]] + [row["event"] for row in told["dead_letters"]]
        lines += [row["line"] for row in told["pending"].values() if row and "line" in row]
        read = json_lines(self._topology.settings).parse_foreign("\n".join(lines[:1]).encode())
        return int(unpack_times(read.times)[0]) if read.times else None

    def _find(self, asked: Asked, unreadable: dict[str, str]) -> Iterator[dict[str, Any]]:
        found = self._index.find(asked.packed) if self._index is not None else []
        if found:
            return iter(found)
        joined = Path(self._topology.output) / "joined"
        indexed = self._index is not None and self._index.status()["caught_up"]
        if indexed and next(joined.rglob("*.parquet"), None) is None:
            return iter(())
        return joined_lines(joined, asked, unreadable)

    def waiting(self, _: Query) -> dict[str, Any]:
        """{datacenters: {name: {waiting, bytes, paused, behind, unended, primary_logs, ages, tries, next,
        silent}}}: `ages`, `tries` and `next` of the WAITING_SHOWN that are tried next."""
        sample = self._look()
        return {"datacenters": {p.datacenter: self._waits(p, sample) for p in self._topology.pipelines}}

    def _waits(self, pipeline: Pipeline, sample: Sample) -> dict[str, Any]:
        own = [one for one in sample.of("dispatcher") if one["datacenter"] == pipeline.datacenter]
        found: list[dict[str, Any]] = []
        silent = []
        for address in pipeline.dispatchers:
            try:
                with closing(DispatcherClient(address, _TIMEOUT_S, self._topology.network(""))) as client:
                    found += client.soonest(WAITING_SHOWN)
            except UnavailableError as error:
                silent.append(str(error))
        found = sorted(found, key=lambda one: int(one["due_us"]))[:WAITING_SHOWN]
        now_us = time.time() * 1e6
        ages = [(now_us - one["waiting_since_us"]) / 1e6 for one in found]
        return {
            "waiting": sum(one["pending"] for one in own),
            "bytes": sum(one["waiting_bytes"] for one in own),
            "paused": [one["paused"] for one in own if one["paused"]],
            "behind": [one["backlog"] for one in own],
            "unended": {name: why for one in own for name, why in one["unended"].items()},
            "primary_logs": {
                name: {
                    "caught_up": one["caught_up"],
                    "unended": one["unended"],
                    "unreadable": one["unreadable"],
                }
                for name, one in sample.answered().items()
                if name.startswith(f"eventstore-{pipeline.datacenter}")
            },
            "ages": _by(ages, _AGE_EDGES_S),
            "tries": _by([one["tries"] for one in found], _TRIES_EDGES),
            "next": [one | {"line": one["line"][:LINE_CHARS_MAX]} for one in found],
            "silent": silent,
        }

    def dead_letters(self, query: Query) -> dict[str, Any]:
        """{fates, kinds, letters, more, acts}: letters of ?datacenter, ?fate, ?reason, from ?skip on."""
        home = Path(self._topology.output) / "dead-letters"
        names = sorted(path.name for path in home.glob("*") if path.is_dir())
        chosen = query.get("datacenter", "")
        if chosen and chosen not in names:
            raise UsageError(f"no dead letters of '{chosen}'; there are those of: {', '.join(names)}")
        fates = tuple(Fate(fate) for fate in [query.get("fate", "")] if fate in FATES)
        wanted = Filter(fates, query.get("reason", ""))
        skip = int(query["skip"]) if query.get("skip", "").isdigit() else 0
        letters = (
            letter.told(name)
            for name in ([chosen] if chosen else names)
            for _, letter in read_letters(home / name)
            if wanted.takes(letter)
        )
        shown = list(islice(letters, skip, skip + LETTERS_A_PAGE + 1))
        return {
            "datacenters": names,
            "fates": FATES,
            "kinds": {name: self._kinds(home / name) for name in names},
            "letters": [one | {"event": one["event"][:LINE_CHARS_MAX]} for one in shown[:LETTERS_A_PAGE]],
            "skip": skip,
            "more": len(shown) > LETTERS_A_PAGE,
            "acts": list(self._beside.acts),
        }

    def _kinds(self, directory: Path) -> list[dict[str, Any]]:
        """Counted anew when the letters have changed."""
        seen = tuple(sorted((path.name, path.stat().st_size) for path in directory.iterdir()))
        known = self._letters.get(directory)
        if known is None or known[0] != seen:
            known = self._letters[directory] = seen, count_letters(directory, Filter())
        return known[1]

    def registry(self, _: Query) -> dict[str, Any]:
        """{replicas: what each says, or None; quorum}"""
        sample = self._look()
        replicas = {name: one for name, one in sample.statuses.items() if name.startswith("registry")}
        return {"replicas": replicas, "quorum": sample.has_quorum()}

    def members(self, _: Query) -> dict[str, Any]:
        """{groups, processes: {name: what it says}}: who has which shares."""
        sample = self._look()
        rest = {name: one for name, one in sample.statuses.items() if not name.startswith("registry")}
        return {
            "groups": dict(groups_of(sample)),
            "processes": {name: _brief(one) for name, one in rest.items()},
        }

    def millwheel(self, query: Query) -> dict[str, Any]:
        """{status, why, acts}: `why` of the computation ?name. {} where there is none."""
        ask = self._beside.millwheel
        if ask is None:
            return {}
        name = query.get("name", "")
        return {
            "status": ask("status"),
            "why": ask("why", name) if name else None,
            "acts": list(self._beside.acts),
        }


def summed_up(told: dict[str, Any], own_us: int | None) -> dict[str, Any]:
    """{fate, timeline: [{time_us, datacenter, what}]} of what photon.cluster.explain has found. Pure."""
    timeline: list[dict[str, Any]] = []

    def add(time_us: int, datacenter: str, what: str) -> None:
        timeline.append({"time_us": time_us, "datacenter": datacenter, "what": what})

    if own_us is not None:
        add(own_us, "", "the event's own time")
    registry = told["registry"]
    if registry is not None and "silent" not in registry:
        by = registry["process"] or registry["joiner"]
        add(registry["time_us"], "registry", f"registered by {by}, in shard {registry['shard']}")
    for datacenter, row in told["pending"].items():
        if row is not None and "silent" not in row:
            read = f"read from {row['file']}, and its primary was not there"
            add(row["waiting_since_us"], datacenter, read)
            add(row["due_us"], datacenter, f"is tried again, after {row['tries']} tries")
    timeline.sort(key=lambda row: int(row["time_us"]))
    return {"fate": verdict_on_event(told), "timeline": timeline}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _by(values: list[Any], edges: tuple[int, ...]) -> list[dict[str, Any]]:
    """How many are below each edge, and in the last how many are not."""
    found = Counter(next((edge for edge in edges if value < edge), None) for value in values)
    return [{"below": edge, "count": found[edge]} for edge in (*edges, None)]


def _brief(status: Status | None) -> dict[str, Any] | None:
    """What has a line: no histograms."""
    if status is None:
        return None
    return {"line": line_of(status), "lease": status.get("lease"), "serves": status.get("serves")}
