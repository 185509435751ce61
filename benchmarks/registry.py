"""What `photon bench registry` measures, part by part. Needs a checkout; fsync is on wherever it counts."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.registry_etcd import beside_etcd
from benchmarks.registry_failover import failover
from benchmarks.registry_parts import Plan, batching, throughput
from benchmarks.registry_reshard import reshard
from benchmarks.registry_wan import wan
from photon.app.machine import describe_machine

PARTS: Final[dict[str, Callable[[Plan], dict[str, Any]]]] = {
    "throughput": throughput,
    "etcd": beside_etcd,
    "wan": wan,
    "failover": failover,
    "batching": batching,
    "reshard": reshard,
}
_SYNCS: Final = 200
_SYNC_BYTES: Final = 65_536


def run(plan: Plan, parts: Iterable[str], told: Callable[[str], None]) -> dict[str, Any]:
    """The machine and each part's figures; `told` hears what comes next. PhotonError if it can't."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    report = {"machine": {**describe_machine(), **_disk(plan.directory), "load": _load()}}
    for name in parts:
        told(f"measuring {name}")
        report[name] = PARTS[name](plan)
    return report


def _load() -> str:
    """Of others, if they are: the figures are worth less then."""
    return f"{os.getloadavg()[0]:.1f} over the last minute"


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
