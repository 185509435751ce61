"""A long round trip between the replicas: commits pipeline, and what a killed leader costs there."""

import statistics
from typing import Any, Final

from benchmarks.registry_failover import SETTLED_S, WATCH_S, kill_once
from benchmarks.registry_load import measure
from benchmarks.registry_parts import Plan, grown, system
from benchmarks.registry_processes import percentiles

ROUND_TRIP_MS: Final = 100.0
# The one setting that long links need: heartbeats, elections and the leader's fallback follow from it.
SETTINGS: Final = {"election_timeout_ms": 1_000}
TARGET_IDS_PER_S: Final = 100_000
TARGET_P50_TRIPS: Final = 1.3
TARGET_P99_TRIPS: Final = 2.5
_JUDGED: Final = (1_000, 16)
_CASES: Final = ((1, 1), (1_000, 1), _JUDGED, (1_000, 64))
_CASES_QUICK: Final = (_JUDGED,)
_KILLS: Final = 5


def wan(plan: Plan) -> dict[str, Any]:
    """The clients are near the leader. Latencies also in round trips between the replicas."""
    rows = []
    with system(plan, settings=SETTINGS, delay_ms=ROUND_TRIP_MS / 2) as (cluster, clients):
        for ids, in_flight in _CASES_QUICK if plan.quick else _CASES:
            measured = measure(cluster, clients, plan.seconds, ids=ids, in_flight=in_flight)
            trips = {
                name.replace("_ms", "_trips"): round(value / ROUND_TRIP_MS, 2)
                for name, value in percentiles(measured.latencies_ms).items()
            }
            rows.append({**grown(measured, ids, in_flight), **trips})
        kills = 0 if plan.quick else min(_KILLS, plan.kills)
        gaps = []
        for _ in range(kills):
            cluster.wait_until_settled(2 * SETTLED_S)
            gaps.append(round(kill_once(cluster, clients, 2 * WATCH_S), 2))
    judged = next(row for row in rows if (row["ids"], row["in_flight"]) == _JUDGED)
    return {
        "round_trip_ms": ROUND_TRIP_MS,
        "settings": SETTINGS,
        "wan_rows": rows,
        **({"killed_p50_s": statistics.median(gaps), "killed_each_s": gaps} if gaps else {}),
        "ids_per_s": judged["ids_per_s"],
        "target_ids_per_s": TARGET_IDS_PER_S,
        "target_trips": {"p50": TARGET_P50_TRIPS, "p99": TARGET_P99_TRIPS},
        "reached": judged["ids_per_s"] > TARGET_IDS_PER_S
        and judged["p50_trips"] < TARGET_P50_TRIPS
        and judged["p99_trips"] < TARGET_P99_TRIPS,
    }
