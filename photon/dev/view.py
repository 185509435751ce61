"""What a person or a script sees of `photon dev` while it runs. Nothing here decides anything.

`figures_of` takes the difference of what the processes said some seconds apart; a View shows it.
"""

import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Of one datacenter. None where nothing is known (yet).

    `silent`: its processes that do not answer. `latency_ms` {p50, p90, p99}, `joined_per_s` and
    `cache_hit_ratio` are of the window; `joined`, `foreign_events`, `wasted_joins` of all time; `pending`
    events wait to be tried again or are on their way.
    """

    datacenter: str
    region: str
    silent: Sequence[str] = ()
    joined: int | None = None
    joined_per_s: float = 0.0
    foreign_events: int | None = None
    pending: int | None = None
    in_flight: int | None = None
    """Events read or taken for a retry, and not recorded."""
    wasted_joins: int | None = None
    wasted_ratio: float | None = None
    """Of the joins in the window: so many were done in vain."""
    cache_hit_ratio: float | None = None
    latency_ms: Mapping[str, float | None] = field(default_factory=dict)
    adds_up: bool = True


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """Of one shard of the registry. `leader`: a replica, None while nobody leads; `ids`: it holds.

    `events_per_batch` is None where no batch was committed in the window.
    """

    shard: int
    leader: str | None
    datacenter: str
    """The leader's."""
    ids: int
    batches_per_s: float
    events_per_batch: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at a system."""

    pipelines: Sequence[PipelineFigures]
    shards: Sequence[ShardFigures]
    replicas: int
    replicas_up: int
    silent: Sequence[str]
    """Processes that do not answer."""


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

    def last(self, process: str) -> Status | None:
        return self._samples[-1].statuses.get(process)

    def steps(self, process: str) -> Iterator[tuple[Status, Status]]:
        """Each two answers of a process that follow each other."""
        answers = [status for sample in self._samples if (status := sample.statuses.get(process)) is not None]
        return itertools.pairwise(answers)

    def silent(self) -> list[str]:
        return self._samples[-1].silent()


def figures_of(topology: Topology, window: Window) -> Figures:
    """`window`: of at least one sample."""
    registries = {r.name: process_name("registry", r.name) for r in topology.replicas}
    up = {name: status for name, process in registries.items() if (status := window.last(process))}
    return Figures(
        pipelines=[_pipeline(topology, window, p.datacenter) for p in topology.pipelines],
        shards=[_shard(topology, window, number, up) for number in _shard_numbers(up.values())],
        replicas=len(registries),
        replicas_up=len(up),
        silent=window.silent(),
    )


def _pipeline(topology: Topology, window: Window, datacenter: str) -> PipelineFigures:
    region = topology.regions.get(datacenter, "")
    own = _processes(topology, datacenter, *PIPELINE_ROLES)
    silent = [name for name in own if window.last(name) is None]
    workers = _processes(topology, datacenter, "dispatcher")
    answers = [status for name in workers if (status := window.last(name))]
    if not answers:
        return PipelineFigures(datacenter, region, silent)
    (now,) = whole(answers)
    steps = [step for name in workers for step in window.steps(name)]
    joined = _grown(steps, lambda s: s["fates"][Fate.JOINED.value])
    wasted = _grown(steps, lambda s: s["wasted_joins"])
    caches = _processes(topology, datacenter, "eventstore")
    hits = sum(_grown(window.steps(name), lambda s: s["cache"]["hits"]) for name in caches)
    misses = sum(_grown(window.steps(name), lambda s: s["cache"]["misses"]) for name in caches)
    return PipelineFigures(
        datacenter,
        region,
        silent,
        joined=now["fates"][Fate.JOINED.value],
        joined_per_s=_per_s(joined, window.seconds),
        foreign_events=now["foreign_events"],
        pending=now["pending"],
        in_flight=now["in_flight"],
        wasted_joins=now["wasted_joins"],
        wasted_ratio=_share(wasted, joined + wasted),
        cache_hit_ratio=_share(hits, hits + misses),
        latency_ms=_latency(steps),
        adds_up=fates_of(now)["adds_up"],
    )


def _processes(topology: Topology, datacenter: str, *roles: str) -> list[str]:
    return [each.title for each in topology.processes(*roles) if each.datacenter == datacenter]


def _latency(steps: Iterable[tuple[Status, Status]]) -> dict[str, float | None]:
    between = []
    for before, after in steps:
        old, new = before["latency_us"], after["latency_us"]
        counts = [b - a for a, b in itertools.zip_longest(old["counts"], new["counts"], fillvalue=0)]
        if min(counts, default=0) >= 0:
            between.append({"edges": new["edges"], "counts": counts})
    return percentiles_ms(between)


def _shard_numbers(registries: Iterable[Status]) -> list[int]:
    return sorted({row["shard"] for status in registries for row in status["shards"]})


def _shard(topology: Topology, window: Window, number: int, up: Mapping[str, Status]) -> ShardFigures:
    rows = {name: row for name, status in up.items() if (row := _row(status, number))}
    # One that was cut off may think that it leads still; the newest term is right.
    leaders = [name for name, row in rows.items() if row["is_leader"] and row["has_quorum"]]
    leader = max(leaders, key=lambda name: rows[name]["term"], default=None)
    counted = [
        (_grown(steps, lambda row: row["commits"]), _grown(steps, lambda row: row["committed_ids"]))
        for name in up
        if (steps := _row_steps(window, process_name("registry", name), number))
    ]
    batches, ids = sum(c for c, _ in counted), sum(i for _, i in counted)
    return ShardFigures(
        number,
        leader,
        topology.replica(leader).datacenter if leader is not None else "",
        ids=max((row["ids"] for row in rows.values()), default=0) if leader is None else rows[leader]["ids"],
        batches_per_s=_per_s(batches, window.seconds),
        events_per_batch=round(ids / batches, 1) if batches else None,
    )


def _row(status: Status, number: int) -> Status | None:
    return next((row for row in status["shards"] if row["shard"] == number), None)


def _row_steps(window: Window, process: str, number: int) -> list[tuple[Status, Status]]:
    steps = ((_row(before, number), _row(after, number)) for before, after in window.steps(process))
    return [(before, after) for before, after in steps if before is not None and after is not None]


def _grown(steps: Iterable[tuple[Status, Status]], of: Any) -> int:
    """By how much a count has grown; one that fell began anew, with its process."""
    return sum(of(after) - of(before) if of(after) >= of(before) else of(after) for before, after in steps)


def _per_s(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the run, `seconds` after all was up. `killed`: datacenters that are kept down."""

    seconds: float
    phase: str
    figures: Figures
    killed: Sequence[str]
    restarts: int

    def state_of(self, row: PipelineFigures) -> str:
        if row.datacenter in self.killed:
            return "killed"
        return "starting" if row.silent else "up"


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
        elif look.phase != self._phase or look.seconds >= self._due_s:
            every_s = JSON_EVERY_S if self._as_json else LINE_EVERY_S
            self._due_s, self._phase = look.seconds + every_s, look.phase
            click.echo(json.dumps(document_of(look)) if self._as_json else "\n".join(lines_of(look)))

    def _update(self, look: Look) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._in_place is None:
            self._in_place = Live(auto_refresh=False, transient=True)
            self._in_place.start()
        lines = [f"photon dev  {look.seconds:,.0f} s  {look.phase}", *lines_of(look)]
        self._in_place.update(Text("\n".join(lines), no_wrap=True), refresh=True)


def document_of(look: Look) -> dict[str, Any]:
    """The look as plain values, for `--json`."""
    figures = look.figures
    pipelines = [asdict(row) | {"state": look.state_of(row)} for row in figures.pipelines]
    return {
        "seconds": round(look.seconds, 1),
        "phase": look.phase,
        "datacenters": {row.pop("datacenter"): row for row in pipelines},
        "shards": [asdict(row) for row in figures.shards],
        "replicas": figures.replicas,
        "replicas_up": figures.replicas_up,
        "killed": list(look.killed),
        "silent": list(figures.silent),
        "restarts": look.restarts,
    }


def lines_of(look: Look) -> list[str]:
    at = f"{look.seconds:6.1f} s"
    lines = []
    for row in look.figures.pipelines:
        latency = "/".join(
            "-" if (ms := row.latency_ms.get(name)) is None else f"{ms:,.0f}"
            for name in ("p50", "p90", "p99")
        )
        joined_per_s = "-" if row.joined is None else f"{row.joined_per_s:,.0f}"
        share = "" if row.wasted_ratio is None else f" ({_percent(row.wasted_ratio)})"
        lines.append(
            f"{at}  {row.datacenter:<8} {look.state_of(row):<8}  joined {_number(row.joined)}  "
            f"joined/s {joined_per_s}  p50/p90/p99 ms {latency}  cache {_percent(row.cache_hit_ratio)}  "
            f"wasted {_number(row.wasted_joins)}{share}  waiting {_number(row.pending)}"
            + ("" if row.adds_up else "  FATES DO NOT ADD UP")
        )
    for shard in look.figures.shards:
        where = f" ({shard.datacenter})" if shard.datacenter else ""
        batch = "-" if shard.events_per_batch is None else f"{shard.events_per_batch:,.1f}"
        lines.append(
            f"{at}  shard {shard.shard}  leader {shard.leader or 'NONE'}{where}  ids {shard.ids:,}  "
            f"batches/s {shard.batches_per_s:,.0f}  events/batch {batch}"
        )
    return [*lines, f"{at}  {_state(look)}"]


def _state(look: Look) -> str:
    figures = look.figures
    parts = [f"replicas {figures.replicas_up}/{figures.replicas}", f"restarts {look.restarts}"]
    if look.killed:
        parts.append(f"killed: {', '.join(look.killed)}")
    if figures.silent:
        parts.append(f"down: {', '.join(figures.silent)}")
    return "  ".join(parts)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
