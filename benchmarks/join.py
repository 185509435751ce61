"""`photon bench join`: the whole system measured, part by part, from files to files, every output checked."""

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.join_live import live
from benchmarks.join_peers import beside_peers
from benchmarks.join_runs import MIB, Drain, Plan, drain, generated
from benchmarks.machine import describe_machine
from benchmarks.tables import Row

LIVE_QUERIES_PER_S: Final = 2_000.0
LIVE_CLICKS_PER_S: Final = 400.0
MEMORY_TIMES: Final = 10
_MEMORY_SETTINGS: Final = "[eventstore]\ncache_bytes = 33554432\n"
"""A cache that the shorter logs fill, too: what is left to see is what grows with the length."""


def catch_up(plan: Plan) -> list[Row]:
    """`photon join` over existing logs: wall seconds, start included; the median run and the spread."""
    row, middle = _median(plan, "catch-up", plan.queries, plan.clicks, "seconds", lambda run: run.seconds)
    row["clicks_per_s"] = round(middle.pairs / middle.seconds)
    row["wasted_joins"] = middle.summary["wasted_joins"]
    return [row | _cost(middle)]


def steady(plan: Plan) -> list[Row]:
    """Joined a second while nothing starts or ends: between a tenth and nine tenths of the output."""
    sizes = (plan.steady_queries, plan.steady_clicks)
    row, middle = _median(plan, "steady", *sizes, "joined_per_s", Drain.steady_per_s)
    return [row | _cost(middle)]


def _median(
    plan: Plan, part: str, queries: int, clicks: int, figure: str, value: Callable[[Drain], float]
) -> tuple[Row, Drain]:
    """Several runs over the same logs: the figure of the middle one and the spread; that run."""
    logs = generated(plan.directory, queries, clicks)
    runs = sorted((drain(logs, plan.directory / part) for _ in range(plan.runs)), key=value)
    middle = runs[len(runs) // 2]
    row: Row = {"queries": logs.queries, "clicks": logs.clicks}
    for which, run in (("", middle), ("_min", runs[0]), ("_max", runs[-1])):
        row[figure + which] = round(value(run), 2)
    return {**row, "runs": len(runs)}, middle


def _cost(run: Drain) -> Row:
    return {"cpu_us_per_click": run.cpu_us_per_click(), "peak_mib": run.usage.total // MIB}


def live_latency(plan: Plan) -> list[Row]:
    """From a click's line written to its joined line readable, at a rate far below what the machine can."""
    return [live(plan.directory, plan.live_seconds, LIVE_QUERIES_PER_S, LIVE_CLICKS_PER_S)]


def half_load(plan: Plan, steady_per_s: int) -> list[Row]:
    """The same at half of the steady rate, with the steady run's share of queries."""
    clicks_per_s = steady_per_s / 2
    queries_per_s = clicks_per_s * plan.steady_queries / plan.steady_clicks
    return [live(plan.directory, plan.live_seconds, queries_per_s, clicks_per_s)]


def fast_path(plan: Plan) -> list[Row]:
    """Live, with the events sent by the fast path as well, and without."""
    rows = []
    for with_it in (False, True):
        row = live(plan.directory, plan.live_seconds, LIVE_QUERIES_PER_S, LIVE_CLICKS_PER_S, with_it)
        sent = row.pop("fast_path", {}).get("foreigns", {})
        rows.append({"fast_path": "on" if with_it else "off", **row, "joined_by_it": sent.get("joined", 0)})
    return rows


def memory(plan: Plan) -> list[Row]:
    """Peaks over logs of one length and of ten, by role. Only the registry may grow: it keeps every id."""
    rows = []
    for times in (1, MEMORY_TIMES):
        logs = generated(plan.directory, plan.queries // 4 * times, plan.clicks * times)
        usage = drain(logs, plan.directory / "memory", _MEMORY_SETTINGS).usage
        roles = {f"{role}_mib": size // MIB for role, size in sorted(usage.by_role.items())}
        rows.append(
            {
                "queries": logs.queries,
                "clicks": logs.clicks,
                "anonymous_mib": usage.anonymous // MIB,
                "shared_mib": usage.shared // MIB,
                **roles,
            }
        )
    return rows


def lookups(plan: Plan) -> list[Row]:
    """What looking up before sending saves, with two datacenters over the same logs (paper 3.2)."""
    return _compare(
        plan, "lookup_before_send", "[dispatcher]\nlookup_before_send = {}\n", ("true", "false"), 2
    )


def fsync(plan: Plan) -> list[Row]:
    """The price of durable joined logs and intents; the registry syncs either way."""
    return _compare(plan, "joiner.fsync", "[joiner]\nfsync = {}\n", ("true", "false"), 1)


def _compare(plan: Plan, name: str, settings: str, values: tuple[str, ...], datacenters: int) -> list[Row]:
    """Steady runs with each value in turn, so that a noisy neighbour meets all; medians."""
    logs = generated(plan.directory, plan.steady_queries, plan.steady_clicks)
    runs: dict[str, list[Drain]] = {value: [] for value in values}
    for _ in range(plan.runs):
        for value, done in runs.items():
            done.append(drain(logs, plan.directory / "compare", settings.format(value), datacenters))
    return [
        {
            name: value,
            "runs": len(done),
            "seconds": round(median(run.seconds for run in done), 2),
            "cpu_us_per_click": median(run.cpu_us_per_click() for run in done),
            "wasted_joins": round(median(run.summary["wasted_joins"] for run in done)),
        }
        for value, done in runs.items()
    ]


HALF_LOAD: Final = "half-load"
"""A part, too; it needs the steady rate."""
PARTS: Final[dict[str, Callable[[Plan], list[Row]]]] = {
    "catch-up": catch_up,
    "steady": steady,
    "live": live_latency,
    HALF_LOAD: lambda plan: half_load(plan, steady(plan)[0]["joined_per_s"]),
    "memory": memory,
    "lookups": lookups,
    "fsync": fsync,
    "fast-path": fast_path,
}


def run(
    plan: Plan, only: Sequence[str], peers: bool, pythons: Sequence[str], tell: Callable[[str], object]
) -> dict[str, Any]:
    """The machine and the rows of each part. BenchError for a wrong output."""
    report: dict[str, Any] = {"machine": {**describe_machine(), "load": round(os.getloadavg()[0], 1)}}
    for name, part in PARTS.items():
        if name in only or not (only or peers):
            tell(name)
            rate = report["steady"][0]["joined_per_s"] if name == HALF_LOAD and "steady" in report else None
            report[name] = part(plan) if rate is None else half_load(plan, rate)
    if peers:
        report["peers"] = beside_peers(plan, pythons, tell)
    return report
