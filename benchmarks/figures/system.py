"""What the figures of the whole system show, measured on a real one: Figs. 7, 8, 9, 12 and 13.

Two pipelines and five replicas of the registry in three regions, as in the paper's section 4; real processes,
and a toxiproxy in each link between datacenters, which adds 100 ms to a round trip between regions.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from photon.cluster.summary import Sample, Status
from photon.cluster.topology import PIPELINE_ROLES
from photon.core.fates import Fate
from tests.faults.kit.feeder import Feed
from tests.faults.kit.system import FaultSystem

ROUND_TRIP_MS: Final = 100.0
JITTER_MS: Final = 5.0
SEED: Final = 2013
CLICKS_PER_S: Final = 250.0
QUERIES_A_CLICK: Final = 6.0
OUTAGE_S: Final = (30.0, 60.0)
SECONDS: Final = 120.0
WASTED_SECONDS: Final = 60.0
ARRIVAL_S: Final = 2.0
"""Each datacenter's copy of the logs is behind by a time that changes, up to so much."""
WASTED_RUNS: Final = {
    "looked up": (True, ARRIVAL_S),
    "looked up, copies further apart": (True, 5 * ARRIVAL_S),
    "not looked up": (False, ARRIVAL_S),
}
"""Name -> whether the dispatcher looks up before it sends, and how late the copies are."""
SAMPLE_S: Final = 1.0
SETTLED_S: Final = 5.0
"""The start, with its elections, is not of the figure."""
DOWN: Final = "east"
_DRAIN_S: Final = 180.0

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    # What links of 100 ms need (docs/registry.md).
    "registry": {"election_timeout_ms": 1_000, "lease_s": 10.0, "request_timeout_s": 10.0, "shards": 2},
    # So small that clicks which come late are looked up in the logs.
    "eventstore": {"cache_bytes": 1 << 20},
}


def outage(directory: Path, quick: bool) -> dict[str, Any]:
    """All is well, then a datacenter is killed, then it comes back: a row a second of each datacenter."""
    seconds, down_at, up_at = (24.0, 6.0, 12.0) if quick else (SECONDS, *OUTAGE_S)
    feed = _feed(seconds, late=0.15, late_s=(1.0, 20.0))
    with _system(directory, feed, {}) as system:
        began = time.monotonic()
        events: list[tuple[float, Callable[[], None]]] = [
            (down_at, lambda: system.dev.kill_datacenter(DOWN)),
            (up_at, lambda: system.dev.restore_datacenter(DOWN)),
        ]
        samples = _sample(system, began, seconds, events)
        report = system.finish(_DRAIN_S)
    return {
        "seconds": seconds,
        "down": DOWN,
        "down_at_s": down_at,
        "up_at_s": up_at,
        "rows": rows_of(samples, began),
        "report": report.as_document(),
    }


def wasted(directory: Path, quick: bool) -> dict[str, Any]:
    """Joins done in vain, with the dispatcher's lookup before it sends and without."""
    seconds = 10.0 if quick else WASTED_SECONDS
    runs = {}
    for number, (name, (lookup, arrival_s)) in enumerate(WASTED_RUNS.items()):
        settings = {"dispatcher": {"lookup_before_send": lookup}}
        with _system(directory / str(number), _feed(seconds, arrival_s=arrival_s), settings) as system:
            began = time.monotonic()
            samples = _sample(system, began, seconds, [])
            report = system.finish(_DRAIN_S)
        runs[name] = {"rows": rows_of(samples, began), "report": report.as_document()}
    return {"seconds": seconds, "runs": runs}


def _feed(
    seconds: float,
    late: float = 0.05,
    late_s: tuple[float, float] = (1.0, 5.0),
    arrival_s: float = ARRIVAL_S,
) -> Feed:
    return Feed(
        SEED,
        clicks=round(seconds * CLICKS_PER_S),
        clicks_per_s=CLICKS_PER_S,
        queries_a_click=QUERIES_A_CLICK,
        late=late,
        late_s=late_s,
        arrival_s=arrival_s,
        all_late=True,
    )


@contextmanager
def _system(directory: Path, feed: Feed, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[FaultSystem]:
    """A system whose feeder starts once it runs as it should."""
    directory.mkdir(parents=True, exist_ok=True)
    made = FaultSystem(directory, SEED, feed, replicas=5, settings={**SETTINGS, **settings}, proxies=True)
    try:
        made.proxies.latency(made.topology.regions, ROUND_TRIP_MS, JITTER_MS)
        made.start(feed=False)
        for shard in (None, 0, 1):
            made.until_leader(shard)
        made.run_for(SETTLED_S)
        made.feeder.start()
    except BaseException:
        made.close()
        raise
    with made:
        yield made


def _sample(
    system: FaultSystem, began: float, seconds: float, events: Sequence[tuple[float, Callable[[], None]]]
) -> list[Sample]:
    """What every process said, second by second, until all is drained after `seconds`; `events` meanwhile."""
    left = list(events)
    samples = []
    number = 0
    while True:
        due = began + number * SAMPLE_S
        number += 1
        system.run_for(max(0.0, due - time.monotonic()))
        now = time.monotonic() - began
        while left and now >= left[0][0]:
            left.pop(0)[1]()
        statuses = system.statuses(PIPELINE_ROLES)
        samples.append(Sample(time.monotonic(), dict(statuses)))
        if now >= seconds and not left and _drained(system, statuses):
            return samples
        if now >= seconds + _DRAIN_S:
            raise TimeoutError(f"not drained {_DRAIN_S:g} s after the last event")


def _drained(system: FaultSystem, statuses: Mapping[str, Mapping[str, Any]]) -> bool:
    written = system.feeder.written
    dispatchers = [status for name, status in statuses.items() if name.startswith("dispatcher")]
    return len(dispatchers) == len(written) and all(
        status["foreign_events"] >= written[status["datacenter"]] and not status["pending"]
        for status in dispatchers
    )


def rows_of(samples: Sequence[Sample], began: float) -> list[dict[str, Any]]:
    """Seconds since `began` and, of each datacenter that answers, what happened since the look before: all
    that a dispatcher's counts have grown by since it was last heard. An event store counts from its start.
    """
    rows = []
    heard: dict[str, Status | None] = {}
    for before, after in itertools.pairwise(samples):
        heard |= before.statuses
        seconds = after.at_s - before.at_s
        names = [n.removeprefix("dispatcher-") for n in after.statuses if n.startswith("dispatcher-")]
        datacenters = {
            name: _counted(heard.get(f"dispatcher-{name}"), after.statuses[f"dispatcher-{name}"], seconds)
            | _looked_up(name, before, after, seconds)
            for name in names
        }
        rows.append({"at_s": round(after.at_s - began, 2), "datacenters": datacenters})
    return rows


def _counted(old: Status | None, new: Status | None, seconds: float) -> dict[str, Any]:
    assert new is not None
    if old is None:
        return {"pending": new["pending"]}
    joined, duplicate = (
        new["fates"][fate.value] - old["fates"][fate.value] for fate in (Fate.JOINED, Fate.DUPLICATE)
    )
    wasted_joins = new["wasted_joins"] - old["wasted_joins"]
    return {
        "pending": new["pending"],
        "read_per_s": round((new["foreign_events"] - old["foreign_events"]) / seconds, 1),
        "joined_per_s": round(joined / seconds, 1),
        "wasted_per_s": round(wasted_joins / seconds, 1),
        # Known to be joined before they were sent.
        "skipped_per_s": round(max(0, duplicate - wasted_joins) / seconds, 1),
        "latency": _latency(old["latency_us"], new["latency_us"]),
    }


def _looked_up(datacenter: str, before: Sample, after: Sample, seconds: float) -> dict[str, Any]:
    old, new = (sample.statuses.get(f"eventstore-{datacenter}") for sample in (before, after))
    if old is None or new is None:
        return {}
    row = {
        f"{tier}_hits_per_s": round(max(0, new[tier]["hits"] - old[tier]["hits"]) / seconds, 1)
        for tier in ("cache", "logs")
    }
    misses = new["logs"]["misses"] - old["logs"]["misses"]
    return row | {"absent_per_s": round(max(0, misses) / seconds, 1)}


def _latency(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    # Buckets beyond the last that counted anything are left out.
    buckets = len(new["edges"]) + 1
    before, after = ([*one["counts"], *[0] * (buckets - len(one["counts"]))] for one in (old, new))
    return {"edges": new["edges"], "counts": [b - a for a, b in zip(before, after, strict=True)]}
