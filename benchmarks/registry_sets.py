"""`photon bench registry --only sets`: what each registry process does with one, two and four sets under the
same load, and a set that can do no more relieved by others.

On a few cores more processes are not faster together: in the second part each is held to a share of a core,
as if it had a small machine of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.measuring import BenchError, Row, cpu_seconds
from benchmarks.registry_load import Cluster, measure, running

SETS: Final = (1, 2, 4)
SHARDS: Final = 4
RELIEF: Final = (1, 2)
"""More sets, each process with its share, are more than two cores have."""
RELIEF_IDS: Final = 4_000
IDS: Final = 1_000
CALLS_PER_S: Final = 40.0
SHARE: Final = 0.2
"""Of a core, that each process is held to."""
IN_FLIGHT: Final = 16
_GROUPS: Final = Path("/sys/fs/cgroup")
_PERIOD_US: Final = 10_000


def spread(directory: Path, seconds: float) -> list[Row]:
    """The same load on each number of sets: ids and CPU seconds of the busiest process, and of all."""
    rows = []
    for sets in SETS:
        with running(directory, settings={"shards": SHARDS}, sets=sets) as (cluster, clients):
            before = _used(cluster)
            load = {"ids": (IDS, IDS), "in_flight": IN_FLIGHT, "calls_per_s": CALLS_PER_S}
            measured = measure(cluster.meter(), clients, seconds, **load)
            after = _used(cluster)
            if measured.seen.failures:
                raise BenchError(f"commits failed: {measured.seen.failures}")
            hosted = {node: sum(one["ids"] for one in cluster.shards(node)) for node in cluster.sets}
        cpu_s = {node: after[node] - before[node] for node in after}
        row = measured.row()
        rows.append(
            {
                "sets": sets,
                "processes": len(cpu_s),
                **{key: row[key] for key in ("ids_per_s", "p50_ms", "p99_ms")},
                "most_ids_held_by_one": max(hosted.values()),
                "busiest_cpu_s": round(max(cpu_s.values()), 2),
                "all_cpu_s": round(sum(cpu_s.values()), 2),
            }
        )
    return rows


def relief(directory: Path, seconds: float) -> list[Row]:
    """As many ids as one and two sets take, of a shard each, every process held to SHARE of a core."""
    rows = []
    for sets in RELIEF:
        with (
            running(directory, settings={"shards": sets}, sets=sets) as (cluster, clients),
            held_to(SHARE, cluster.pids),
        ):
            load = {"ids": (RELIEF_IDS, RELIEF_IDS), "in_flight": IN_FLIGHT * sets}
            row = measure(cluster.meter(), clients, seconds, **load).row()
        told = ("ids_per_s", "p50_ms", "p99_ms", "failures")
        rows.append({"sets": sets, **{key: row[key] for key in told}})
    for row in rows:
        row["times_one_set"] = round(row["ids_per_s"] / rows[0]["ids_per_s"], 2)
    return rows


def _used(cluster: Cluster) -> dict[str, float]:
    return {node: cpu_seconds([pid]) for node, pid in cluster.pids.items()}


@contextmanager
def held_to(share: float, pids: Mapping[str, int]) -> Iterator[None]:
    """Each process gets this share of a core. BenchError where control groups can't be made."""
    made = []
    try:
        for node, pid in pids.items():
            try:
                made.append(_group(f"photon-{pid}-{node}", share))
                (made[-1] / "cgroup.procs").write_text(str(pid))
            except OSError as error:
                raise BenchError(f"no control group can be made here ({error}); run as root") from error
        yield
    finally:
        for group in made:
            for member in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(member)
            group.rmdir()


def _group(name: str, share: float) -> Path:
    quota_us = round(share * _PERIOD_US)
    if (_GROUPS / "cpu").is_dir():  # version 1
        path = _GROUPS / "cpu" / name
        path.mkdir()
        (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        path = _GROUPS / name
        path.mkdir()
        (path / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    return path
