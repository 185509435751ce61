"""What the figures show, measured: of the whole system Figs. 7, 8, 9, 12 and 13, of the registry 10 and 11.

Two pipelines and five replicas of the registry in three regions, as in the paper's section 4; real processes,
and a toxiproxy in each link between datacenters, which adds 100 ms to a round trip between regions.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from benchmarks.registry_load import connect, measure, running
from photon.cluster.statuses import Sample, Status
from photon.core.fates import Fate
from photon.core.ids import Token
from photon.core.settings import PIPELINE_ROLES
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
    "registry": {"shards": 2},
    # So small that clicks which come late are looked up in the logs.
    "eventstore": {"cache_bytes": 1 << 20},
}


def outage(directory: Path, quick: bool) -> dict[str, Any]:
    """All is well, then a datacenter is killed, then it comes back: a row a second of each datacenter."""
    seconds, down_at, up_at = (24.0, 6.0, 12.0) if quick else (SECONDS, *OUTAGE_S)
    feed = _feed(seconds, late=0.15, late_s=(1.0, 20.0))

    def events(system: FaultSystem) -> list[tuple[float, Callable[[], None]]]:
        return [
            (down_at, lambda: system.dev.kill_datacenter(DOWN)),
            (up_at, lambda: system.dev.restore_datacenter(DOWN)),
        ]

    found = _run(directory, seconds, feed, events)
    return {"seconds": seconds, "down": DOWN, "down_at_s": down_at, "up_at_s": up_at, **found}


def wasted(directory: Path, quick: bool) -> dict[str, Any]:
    """Joins done in vain, with the dispatcher's lookup before it sends and without."""
    seconds = 10.0 if quick else WASTED_SECONDS
    runs = {}
    for number, (name, (lookup, arrival_s)) in enumerate(WASTED_RUNS.items()):
        settings = {"dispatcher": {"lookup_before_send": lookup}}
        runs[name] = _run(
            directory / str(number), seconds, _feed(seconds, arrival_s=arrival_s), lambda _: [], **settings
        )
    return {"seconds": seconds, "runs": runs}


def _feed(seconds: float, **changed: Any) -> Feed:
    sizes = {"clicks": round(seconds * CLICKS_PER_S), "clicks_per_s": CLICKS_PER_S}
    lateness: dict[str, Any] = {"arrival_s": ARRIVAL_S, "all_late": True}
    return Feed(SEED, queries_a_click=QUERIES_A_CLICK, **{**sizes, **lateness, **changed})


def _run(
    directory: Path,
    seconds: float,
    feed: Feed,
    events: Callable[[FaultSystem], list[tuple[float, Callable[[], None]]]],
    **settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Rows and report of a system whose feeder starts once it runs as it should; `events`: when, what."""
    directory.mkdir(parents=True, exist_ok=True)
    made = FaultSystem(directory, SEED, feed, replicas=5, settings={**SETTINGS, **settings}, proxies=True)
    with closing(made) as system:
        system.proxies.latency(system.topology.regions, ROUND_TRIP_MS, JITTER_MS)
        system.start(feed=False)
        for shard in (None, 0, 1):
            system.until_leader(shard)
        system.run_for(SETTLED_S)
        system.feeder.start()
        began = time.monotonic()
        samples = _sample(system, began, seconds, events(system))
        report = system.finish(_DRAIN_S)
    return {"rows": rows_of(samples, began), "report": report.as_document()}


def _sample(
    system: FaultSystem, began: float, seconds: float, left: list[tuple[float, Callable[[], None]]]
) -> list[Sample]:
    """What every process said, second by second, until all is fed after `seconds`; events meanwhile."""
    samples = []
    for number in itertools.count():
        system.run_for(max(0.0, began + number * SAMPLE_S - time.monotonic()))
        now = time.monotonic() - began
        while left and now >= left[0][0]:
            left.pop(0)[1]()
        samples.append(Sample(time.monotonic(), dict(system.statuses(PIPELINE_ROLES))))
        if now >= seconds + ARRIVAL_S and not left and system.feeder.is_done:
            break
        if now >= seconds + _DRAIN_S:
            raise TimeoutError(f"not fed {_DRAIN_S:g} s after the last event")
    return samples


def rows_of(samples: Sequence[Sample], began: float) -> list[dict[str, Any]]:
    """Seconds since `began` and, of each datacenter that answers, what happened since the look before: all
    that a dispatcher's counts have grown by since it was last heard. An event store counts from its start.
    """
    rows = []
    heard: dict[str, Status | None] = {}
    for before, after in itertools.pairwise(samples):
        heard |= before.statuses
        seconds = after.at_s - before.at_s
        datacenters = {}
        for process, status in after.statuses.items():
            role, _, name = process.partition("-")
            if role == "dispatcher" and status is not None:
                old, new = (sample.statuses.get(f"eventstore-{name}") for sample in (before, after))
                datacenters[name] = _counted(heard.get(process), status, seconds) | _found(old, new, seconds)
        rows.append({"at_s": round(after.at_s - began, 2), "datacenters": datacenters})
    return rows


def _counted(old: Status | None, new: Status, seconds: float) -> dict[str, Any]:
    if old is None:
        return {}
    grown = {key: new[key] - old[key] for key in ("foreign_events", "wasted_joins")}
    grown |= {fate: new["fates"][fate] - old["fates"][fate] for fate in (Fate.JOINED, Fate.DUPLICATE)}
    rates = {
        "read": grown["foreign_events"],
        "joined": grown[Fate.JOINED],
        "wasted": grown["wasted_joins"],
        # Known to be joined before they were sent.
        "skipped": max(0, grown[Fate.DUPLICATE] - grown["wasted_joins"]),
    }
    # Buckets beyond the last that counted anything are left out.
    edges, counts = (new["latency_us"][key] for key in ("edges", "counts"))
    pairs = list(itertools.zip_longest(old["latency_us"]["counts"], counts, fillvalue=0))
    latency = [now - then for then, now in pairs] + [0] * (len(edges) + 1 - len(pairs))
    per_s = {f"{what}_per_s": round(count / seconds, 1) for what, count in rates.items()}
    return {**per_s, "latency": {"edges": edges, "counts": latency}}


def _found(old: Status | None, new: Status | None, seconds: float) -> dict[str, Any]:
    if old is None or new is None:
        return {}
    return {
        f"{tier}_hits_per_s": round(max(0, new[tier]["hits"] - old[tier]["hits"]) / seconds, 1)
        for tier in ("cache", "logs")
    }


# --- the registry alone: server-side batching (Fig. 10), time-based upsharding (Fig. 11)

REQUESTS_PER_S: Final = 400.0
"""The paper's shard gets "hundreds of client write requests per second"."""
_IDS: Final = (1, 20)
_IN_FLIGHT: Final = 64
_STEPS: Final = 12
_STEP_S: Final = 2.5

HOURS_A_SECOND: Final = 1.0
RETENTION_DAYS: Final = 3.0
"""As in the paper: 72 hours of event time, 72 s here."""
SHARDS: Final = (1, 3)
_BEFORE_S: Final = 96.0
_AFTER_S: Final = 120.0
_BATCHES_PER_S: Final = 5
_IDS_A_BATCH: Final = 2_000
_TIMEOUT_S: Final = 20.0


def batching(directory: Path, quick: bool) -> dict[str, Any]:
    """Requests and Raft commits a second, step by step: one commit at a time as the paper's shard has it, and
    ours, which begins the next ones before a majority has answered."""
    return {
        "round_trip_ms": ROUND_TRIP_MS,
        "requests_per_s": REQUESTS_PER_S,
        "ids_a_request": _IDS,
        "series": {
            name: _batching(directory, in_flight, 3 if quick else _STEPS)
            for name, in_flight in (("one at a time", 1), ("pipelined", 16))
        },
    }


def _batching(directory: Path, batches_in_flight: int, steps: int) -> list[dict[str, float]]:
    settings = {"batches_in_flight_max": batches_in_flight}
    rows = []
    with running(directory, settings=settings, delay_ms=ROUND_TRIP_MS / 2) as (cluster, clients):
        for number in range(steps):
            row = measure(
                cluster.meter(), clients, _STEP_S, ids=_IDS, in_flight=_IN_FLIGHT, calls_per_s=REQUESTS_PER_S
            ).row()
            kept = {key: row[key] for key in ("requests_per_s", "ids_a_commit", "p50_ms", "failures")}
            at_s = round(number * _STEP_S, 1)
            rows.append({"at_s": at_s, "commits_per_s": row["raft_commits_per_s"], **kept})
    return rows


def upsharding(directory: Path, quick: bool) -> dict[str, Any]:
    """Ids that each shard holds while one becomes three, in hours of event time: an hour a second."""
    before_s, after_s = (12.0, 12.0) if quick else (_BEFORE_S, _AFTER_S)
    retention_days = RETENTION_DAYS / 8 if quick else RETENTION_DAYS
    settings = {"shards": SHARDS[0], "retention_days": retention_days, "clock_skew_s": 60.0}
    speed, since_s = HOURS_A_SECOND * 3600.0, time.time()
    fast = ("tests.faults.kit.skewed", "0", str(speed), str(since_s), "--")
    rows, adopted, asked_h = [], False, 0.0
    with (
        running(directory, 0, settings, command=fast) as (cluster, _),
        closing(connect(cluster.addresses, _TIMEOUT_S)) as client,
    ):
        node, began = cluster.leader(), time.monotonic()
        for number in range(round((before_s + after_s) * _BATCHES_PER_S)):
            time.sleep(max(0.0, began + number / _BATCHES_PER_S - time.monotonic()))
            now_us = round((since_s + (time.time() - since_s) * speed) * 1e6)
            token = Token("127.0.0.1:7000", 1, now_us).pack()
            client.commit(os.urandom(16 * _IDS_A_BATCH), now_us.to_bytes(8, "little") * _IDS_A_BATCH, token)
            at_h = round((time.monotonic() - began) * HOURS_A_SECOND, 2)
            held = {shard["shard"]: shard["ids"] for shard in cluster.shards(node)}
            if held and number % _BATCHES_PER_S == 0:
                rows.append({"at_h": at_h, "ids": [held.get(shard, 0) for shard in range(max(SHARDS))]})
            if number == round(before_s * _BATCHES_PER_S):
                asked_h, adopted = at_h, client.reshard(SHARDS[1]).adopted
    return {
        "retention_h": round(retention_days * 24),
        "ids_per_h": _BATCHES_PER_S * _IDS_A_BATCH,
        "resharded_at_h": round(asked_h, 1),
        "adopted": adopted,
        "rows": rows,
    }
