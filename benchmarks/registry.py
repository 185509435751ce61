"""`photon bench registry`: the IdRegistry measured through gRPC, part by part; fsync is on where it counts.

Each part takes a plan and gives its figures: `rows` are tables, the rest are single figures.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import psutil

from benchmarks.etcd import HOW_TO_GET, EtcdCluster, version
from benchmarks.machine import describe_machine
from benchmarks.processes import BenchError, percentiles
from benchmarks.registry_cluster import Cluster, has_toxiproxy
from benchmarks.registry_load import Clients, Measured, measure

QUICK_S: Final = 0.7
TARGET_IDS_PER_S: Final = 200_000
# (ids a request, requests in flight)
_COMMITS: Final = ((1, 1), (1, 16), (100, 16), (1_000, 1), (1_000, 4), (1_000, 8), (1_000, 16), (4_000, 8))
_COMMITS_QUICK: Final = ((1, 1), (1_000, 16))
_LOOKUPS: Final = ((1_000, 4), (1_000, 16), (4_000, 8))
_LOOKUPS_QUICK: Final = ((1_000, 16),)
_SMALL: Final = (1, 10)
_CLIENTS: Final = (1, 2, 4, 8, 16, 32, 64)
_CLIENTS_QUICK: Final = (1, 32)
_IDLE_CALLS_PER_S: Final = 25.0
_SYNCS: Final = 200
_SYNC_BYTES: Final = 65_536

ETCD_IDS: Final = 1_000
ETCD_IN_FLIGHT: Final = 16

TARGET_WORST_S: Final = 1.5
_TRYING: Final = 4
_BEFORE_S: Final = 0.5
_KILLS_QUICK: Final = 2

ROUND_TRIP_MS: Final = 100.0
# The one setting that long links need: heartbeats, elections and the leader's fallback follow from it.
WAN_SETTINGS: Final = {"election_timeout_ms": 1_000}
WAN_TARGET_IDS_PER_S: Final = 100_000
WAN_TARGET_TRIPS: Final = {"p50": 1.3, "p99": 2.5}
_WAN_JUDGED: Final = (1_000, 16)
_WAN_CASES: Final = ((1, 1), (1_000, 1), _WAN_JUDGED, (1_000, 64))
_WAN_KILLS: Final = 5

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. `directory`: where the replicas write."""

    directory: Path
    seconds: float = 4.0
    rounds: int = 5
    kills: int = 20
    quick: bool = False
    etcd: str = "etcd"

    @classmethod
    def of(cls, seconds: float, quick: bool, **given: Any) -> Self:
        return cls(seconds=QUICK_S if quick else seconds, quick=quick, **given)


@contextmanager
def system(plan: Plan, clients: int = 2, **options: Any) -> Iterator[tuple[Cluster, Clients]]:
    """A cluster and client processes on it."""
    with Cluster(plan.directory, **options) as cluster, Clients(cluster.addresses, clients) as calling:
        yield cluster, calling


def throughput(plan: Plan) -> Figures:
    """Ids a second as load grows, commits and lookups; the latency of a commit when idle and at half load."""
    with system(plan) as (cluster, clients):

        def paced(load: str, ids: int, calls_per_s: float) -> Figures:
            """Requests at fixed moments, whatever the answers do."""
            many = {"in_flight": 2 if load == "idle" else 32, "calls_per_s": calls_per_s}
            row = measure(cluster, clients, plan.seconds, ids=ids, **many).row()
            return {"load": load, "ids": ids, "asked_per_s": round(calls_per_s, 1), **row}

        idle = [paced("idle", ids, _IDLE_CALLS_PER_S) for ids in (1, 1_000)]
        commits = [
            _grown(measure(cluster, clients, plan.seconds, ids=ids, in_flight=n), ids, n)
            for ids, n in (_COMMITS_QUICK if plan.quick else _COMMITS)
        ]
        best = max(row["ids_per_s"] for row in commits if row["ids"] == 1_000)
        half = paced("half", 1_000, best / 2_000)
        lookups = [
            {"ids": ids, "in_flight": n}
            | measure(cluster, clients, plan.seconds, call="lookup", ids=ids, in_flight=n).row()
            for ids, n in (_LOOKUPS_QUICK if plan.quick else _LOOKUPS)
        ]
        held = cluster.status(cluster.leader())["ids"]
    top = max(row["ids_per_s"] for row in commits)
    return {
        "latency_rows": [*idle, half],
        "commit_rows": commits,
        "lookup_rows": lookups,
        "ids_held_at_the_end": held,
        "ids_per_s": top,
        "target_ids_per_s": TARGET_IDS_PER_S,
        "reached": top >= TARGET_IDS_PER_S,
    }


def _grown(measured: Measured, ids: int, in_flight: int) -> Figures:
    """A row of commits: what the clients asked for, and what the log made of it."""
    return {
        "ids": ids,
        "in_flight": in_flight,
        **measured.rates(),
        "ids_a_commit": round(measured.seen.ids / max(1, measured.commits)),
        **measured.row(),
    }


def beside_etcd(plan: Plan) -> Figures:
    """Ids created a second beside etcd, at the same ids a transaction and in flight.

    Each round measures all, each on a fresh cluster, alone; their medians are compared.
    """
    told = version(plan.etcd)
    if told is None:
        return {"skipped": HOW_TO_GET}

    def etcd(form: str) -> Figures:
        with EtcdCluster(plan.etcd, plan.directory, 4 * ETCD_IDS) as cluster:
            seen, cores = cluster.measure(form, ETCD_IDS, ETCD_IN_FLIGHT, plan.seconds)
        return {"ids_per_s": round(seen.ids / plan.seconds), **percentiles(seen.latencies_ms), "cores": cores}

    def ours() -> Figures:
        with system(plan) as (cluster, clients):
            found = measure(cluster, clients, plan.seconds, ids=ETCD_IDS, in_flight=ETCD_IN_FLIGHT)
        if found.seen.failures:
            raise BenchError(f"commits failed: {found.seen.failures}")
        return {**found.row(), "cores": found.cores["leader"] + found.cores["followers"]}

    measures: dict[str, Callable[[], Figures]] = {
        "etcd nested": lambda: etcd("nested"),
        "etcd flat": lambda: etcd("flat"),
        "photon gRPC": ours,
    }
    if plan.quick:
        del measures["etcd flat"]
    rounds = [
        {name: take() for name, take in measures.items()} for _ in range(1 if plan.quick else plan.rounds)
    ]
    median = {name: statistics.median(one[name]["ids_per_s"] for one in rounds) for name in measures}
    rows = [
        {
            "who": name,
            "ids_per_s": round(median[name]),
            "lowest": min(one[name]["ids_per_s"] for one in rounds),
            "highest": max(one[name]["ids_per_s"] for one in rounds),
            **{
                key: round(statistics.median(one[name][key] for one in rounds), 2)
                for key in ("p50_ms", "p99_ms", "cores")
            },
            **{
                f"times_{other.replace(' ', '_')}": round(median[name] / median[other], 1)
                for other in measures
                if other.startswith("etcd")
            },
        }
        for name in measures
    ]
    return {
        "etcd": told,
        "ids_a_transaction": ETCD_IDS,
        "in_flight": ETCD_IN_FLIGHT,
        "rounds": len(rounds),
        "etcd_rows": rows,
        "ratios": {"photon gRPC": round(median["photon gRPC"] / median["etcd nested"], 1)},
    }


def wan(plan: Plan) -> Figures:
    """A long round trip between the replicas, clients near the leader: commits pipeline; a killed leader."""
    if not has_toxiproxy():
        return {"skipped": "no toxiproxy server here, that part is skipped; to have it: make toxiproxy"}
    rows, gaps = [], []
    with system(plan, settings=WAN_SETTINGS, delay_ms=ROUND_TRIP_MS / 2) as (cluster, clients):
        for ids, in_flight in [_WAN_JUDGED] if plan.quick else _WAN_CASES:
            measured = measure(cluster, clients, plan.seconds, ids=ids, in_flight=in_flight)
            trips = {
                name.replace("_ms", "_trips"): round(value / ROUND_TRIP_MS, 2)
                for name, value in percentiles(measured.seen.latencies_ms).items()
            }
            rows.append({**_grown(measured, ids, in_flight), **trips})
        for _ in range(0 if plan.quick else min(_WAN_KILLS, plan.kills)):
            cluster.wait_until_settled(8.0)
            gaps.append(round(kill_once(cluster, clients, watch_s=10.0), 2))
    judged = next(row for row in rows if (row["ids"], row["in_flight"]) == _WAN_JUDGED)
    return {
        "round_trip_ms": ROUND_TRIP_MS,
        "settings": WAN_SETTINGS,
        "wan_rows": rows,
        **({"killed_p50_s": statistics.median(gaps), "killed_each_s": gaps} if gaps else {}),
        "ids_per_s": judged["ids_per_s"],
        "target_ids_per_s": WAN_TARGET_IDS_PER_S,
        "target_trips": WAN_TARGET_TRIPS,
        "reached": judged["ids_per_s"] > WAN_TARGET_IDS_PER_S
        and all(judged[f"{name}_trips"] < most for name, most in WAN_TARGET_TRIPS.items()),
    }


def failover(plan: Plan) -> Figures:
    """The leader is killed, again and again, at default settings: the time until clients that try succeed."""
    settled_s, watch_s = (0.5, 2.5) if plan.quick else (4.0, 5.0)
    gaps = []
    with system(plan, clients=1) as (cluster, clients):
        for _ in range(_KILLS_QUICK if plan.quick else plan.kills):
            cluster.wait_until_settled(settled_s)
            gaps.append(kill_once(cluster, clients, watch_s))
    return {
        "kills": len(gaps),
        "p50_s": round(statistics.median(gaps), 3),
        "worst_s": round(max(gaps), 3),
        "each_s": [round(gap, 3) for gap in gaps],
        "target_worst_s": TARGET_WORST_S,
        "reached": max(gaps) < TARGET_WORST_S,
    }


def kill_once(cluster: Cluster, clients: Clients, watch_s: float) -> float:
    """Seconds from the kill to the end of the silence it made; the killed one runs again after."""
    begin, end = clients.begin(watch_s, ids=1, in_flight=_TRYING)
    time.sleep(max(0.0, begin + _BEFORE_S - time.monotonic()))
    leader = cluster.leader()
    killed_at = cluster.kill(leader)
    gap = silence_s(sorted(clients.finish().ends), killed_at, end)
    cluster.start(leader)
    cluster.wait_until_even()
    return gap


def silence_s(successes: list[float], killed_at: float, end: float) -> float:
    """From the kill to the end of the longest time without a success after it (at most until `end`).

    The first success after the kill may be an answer that was already on its way.
    """
    moments = [killed_at, *(at for at in successes if at > killed_at), end]
    _, stop = max(pairwise(moments), key=lambda pair: pair[1] - pair[0])
    return stop - killed_at


def batching(plan: Plan) -> Figures:
    """Small requests of ever more clients: requests a second against Raft commits a second (Fig. 10)."""
    rows = []
    with system(plan) as (cluster, clients):
        for count in _CLIENTS_QUICK if plan.quick else _CLIENTS:
            measured = measure(cluster, clients, plan.seconds, ids=_SMALL, in_flight=count)
            share = {"requests_a_commit": round(measured.calls / max(1, measured.commits), 2)}
            rows.append({"clients": count, **measured.rates(), **share, **measured.row()})
    return {"batching_rows": rows}


PARTS: Final[dict[str, Callable[[Plan], Figures]]] = {
    "throughput": throughput,
    "etcd": beside_etcd,
    "wan": wan,
    "failover": failover,
    "batching": batching,
}


def run(plan: Plan, only: Sequence[str], tell: Callable[[str], object]) -> Figures:
    """The machine and each part's figures; `tell` hears what comes next. PhotonError if it can't."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    load = {"load": f"{os.getloadavg()[0]:.1f} over the last minute"}
    report: Figures = {"machine": {**describe_machine(), **_disk(plan.directory), **load}}
    for name, part in PARTS.items():
        if not only or name in only:
            tell(name)
            report[name] = part(plan)
    return report


def _disk(directory: Path) -> dict[str, object]:
    """The file system under the replicas, and what a synced append costs there. Without a disk it is none."""
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint))
    path = directory.resolve()
    kinds = [mount.fstype for mount in mounts if path.is_relative_to(mount.mountpoint)]
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return {
        "file_system": kinds[-1] if kinds else "unknown",
        "sync_64_kib_ms": round(statistics.median(times) * 1e3, 2),
    }
