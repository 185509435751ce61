"""What `photon bench registry` measures through gRPC on one cluster: throughput, latency, batching.

Each part takes a plan and gives its figures: `rows` are tables, the rest are single figures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.registry_cluster import Cluster
from benchmarks.registry_load import Clients, Measured, measure

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
_CLIENT_PROCESSES: Final = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. `directory`: where the replicas write."""

    directory: Path
    seconds: float = 4.0
    rounds: int = 5
    kills: int = 20
    quick: bool = False
    etcd: str = "etcd"


@contextmanager
def system(plan: Plan, **options: Any) -> Iterator[tuple[Cluster, Clients]]:
    """A cluster and client processes on it."""
    with (
        Cluster(plan.directory, **options) as cluster,
        Clients(cluster.addresses, _CLIENT_PROCESSES) as clients,
    ):
        yield cluster, clients


def throughput(plan: Plan) -> dict[str, Any]:
    """Ids a second as load grows, commits and lookups; the latency of a commit when idle and at half load."""
    with system(plan) as (cluster, clients):
        idle = [
            {"load": "idle", "ids": ids, **_paced(cluster, clients, plan, ids, _IDLE_CALLS_PER_S)}
            for ids in (1, 1_000)
        ]
        commits = [
            grown(measure(cluster, clients, plan.seconds, ids=ids, in_flight=in_flight), ids, in_flight)
            for ids, in_flight in (_COMMITS_QUICK if plan.quick else _COMMITS)
        ]
        best = max(row["ids_per_s"] for row in commits if row["ids"] == 1_000)
        half = {"load": "half", "ids": 1_000, **_paced(cluster, clients, plan, 1_000, best / 2_000)}
        lookups = [
            {
                "ids": ids,
                "in_flight": n,
                **measure(cluster, clients, plan.seconds, call="lookup", ids=ids, in_flight=n).row(),
            }
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


def _paced(cluster: Cluster, clients: Clients, plan: Plan, ids: int, calls_per_s: float) -> dict[str, Any]:
    """Requests at fixed moments, whatever the answers do."""
    in_flight = 2 if calls_per_s <= _IDLE_CALLS_PER_S else 32
    measured = measure(cluster, clients, plan.seconds, ids=ids, in_flight=in_flight, calls_per_s=calls_per_s)
    return {"asked_per_s": round(calls_per_s, 1), **measured.row()}


def grown(measured: Measured, ids: int, in_flight: int) -> dict[str, Any]:
    """A row of commits: what the clients asked for, and what the log made of it."""
    return {
        "ids": ids,
        "in_flight": in_flight,
        "requests_per_s": round(measured.calls_per_s),
        "raft_commits_per_s": round(measured.commits / measured.seconds),
        "ids_a_commit": round(measured.ids / max(1, measured.commits)),
        **measured.row(),
    }


def batching(plan: Plan) -> dict[str, Any]:
    """Small requests of ever more clients: requests a second against Raft commits a second (Fig. 10)."""
    rows = []
    with system(plan) as (cluster, clients):
        for count in _CLIENTS_QUICK if plan.quick else _CLIENTS:
            measured = measure(cluster, clients, plan.seconds, ids=_SMALL, in_flight=count)
            rows.append(
                {
                    "clients": count,
                    "requests_per_s": round(measured.calls_per_s),
                    "raft_commits_per_s": round(measured.commits / measured.seconds),
                    "requests_a_commit": round(len(measured.latencies_ms) / max(1, measured.commits), 2),
                    **measured.row(),
                }
            )
    return {"batching_rows": rows}
