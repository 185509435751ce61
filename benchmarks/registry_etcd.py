"""Beside etcd, in one run and in turn: ids created a second at the same ids a transaction and in flight."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.etcd import HOW_TO_GET, EtcdCluster, find_etcd, version
from benchmarks.registry_cluster import Cluster
from benchmarks.registry_engine import Engine
from benchmarks.registry_load import WARM_S, Clients, measure
from benchmarks.registry_parts import Plan
from benchmarks.registry_processes import BenchmarkError, Child, cpu_seconds, percentiles

TARGET_RATIO: Final = 15.0
IDS: Final = 1_000
IN_FLIGHT: Final = 16
_ROUNDS_QUICK: Final = 1
# More than etcd takes on this kind of machine; what is left over is thrown away.
_PREPARED_PER_S: Final = 150

Figures = dict[str, Any]


def beside_etcd(plan: Plan) -> Figures:
    """Each round measures all four, each on a fresh cluster, alone; their medians are compared."""
    program = find_etcd(plan.etcd)
    if program is None:
        return {"skipped": HOW_TO_GET}
    measures: dict[str, Callable[[], Figures]] = {
        "etcd nested": lambda: _etcd(plan, program, "nested"),
        "photon.raft": lambda: _engine(plan),
        "etcd flat": lambda: _etcd(plan, program, "flat"),
        "photon gRPC": lambda: _service(plan),
    }
    if plan.quick:
        del measures["etcd flat"]
    rounds: list[dict[str, Figures]] = [
        {name: take() for name, take in measures.items()}
        for _ in range(_ROUNDS_QUICK if plan.quick else plan.rounds)
    ]
    median = {name: statistics.median(one[name]["ids_per_s"] for one in rounds) for name in measures}
    etcds = [name for name in measures if name.startswith("etcd")]
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
            **{f"times_{etcd.replace(' ', '_')}": round(median[name] / median[etcd], 1) for etcd in etcds},
        }
        for name in measures
    ]
    ratios = {name: round(median[name] / median["etcd nested"], 1) for name in ("photon.raft", "photon gRPC")}
    return {
        "etcd": version(program),
        "ids_a_transaction": IDS,
        "in_flight": IN_FLIGHT,
        "rounds": len(rounds),
        "etcd_rows": rows,
        "ratios": ratios,
        "target_ratio": TARGET_RATIO,
        "reached": ratios["photon.raft"] >= TARGET_RATIO,
    }


def _etcd(plan: Plan, program: str, form: str) -> Figures:
    with (
        EtcdCluster(program, plan.directory, 4 * IDS) as etcd,
        Child("benchmarks.etcd_client", {"address": etcd.leader}) as client,
    ):
        client.ask({"form": form, "ids": IDS, "count": round((plan.seconds + WARM_S) * _PREPARED_PER_S)})
        begin = time.monotonic() + WARM_S
        end = begin + plan.seconds
        client.tell({"form": form, "ids": IDS, "in_flight": IN_FLIGHT, "begin": begin, "end": end})
        time.sleep(max(0.0, begin - time.monotonic()))
        cpu = sum(cpu_seconds(etcd.pids))
        time.sleep(max(0.0, end - time.monotonic()))
        cores = (sum(cpu_seconds(etcd.pids)) - cpu) / plan.seconds
        seen = client.hear()
    if seen["failures"]:
        raise BenchmarkError(f"etcd refused a transaction: {seen['failures'][0]}")
    return _figures(seen["latencies_ms"], plan, cores)


def _engine(plan: Plan) -> Figures:
    with Engine(plan.directory) as engine:
        seen = engine.measure(plan.seconds, WARM_S, IDS, IN_FLIGHT)
    return _figures(seen["latencies_ms"], plan, seen["cores"])


def _service(plan: Plan) -> Figures:
    with Cluster(plan.directory) as cluster, Clients(cluster.addresses, 2) as clients:
        measured = measure(cluster, clients, plan.seconds, ids=IDS, in_flight=IN_FLIGHT)
    if measured.failures:
        raise BenchmarkError(f"commits failed: {measured.failures}")
    return _figures(measured.latencies_ms, plan, measured.cores["leader"] + measured.cores["followers"])


def _figures(latencies_ms: list[float], plan: Plan, cores: float) -> Figures:
    return {
        "ids_per_s": round(len(latencies_ms) * IDS / plan.seconds),
        **percentiles(latencies_ms),
        "cores": cores,
    }
