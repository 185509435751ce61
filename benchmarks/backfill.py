"""`photon backfill` against a plain Spark join of the same files.

    python -m benchmarks.backfill [--queries 10000000] [--clicks 2000000] [--master local[2]] [--dir DIR]
                                  [--config photon.toml]

The plain join reads the same lines, takes the ids by Spark's own JSON expression, joins, splices the lines
and writes them: no registry, no dedupe, nothing that would make its output exactly-once. The backfill has a
registry of three replicas on this machine, and their CPU counts as its own. Each side runs as a process of
its own, start of Spark included; CPU is of all its processes, by samples. On a machine with other work
compare the CPU, not the seconds.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.registry_cluster import Cluster
from photon.app.generate_at_once import generate_at_once
from photon.app.generate_options import AtOnce, Mix
from photon.app.machine import describe_machine
from photon.app.verify_pairs import check_pairs
from photon.core.clock import SystemClock

_SAMPLE_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=10_000_000)
    parser.add_argument("--clicks", type=int, default=2_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="4g")
    parser.add_argument("--dir", type=Path, default=Path("bench-out/backfill"))
    parser.add_argument("--config", help="of the backfill")
    parser.add_argument("--plain", nargs=2, metavar=("LOGS", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("plain", "backfill"), help="one of the two")
    arguments = parser.parse_args()
    if arguments.plain:
        plain(Path(arguments.plain[0]), arguments.plain[1], arguments.master, arguments.driver_memory)
        return
    logs: Path = arguments.dir / f"logs-{arguments.queries}-{arguments.clicks}"
    if not (logs / "truth.json").exists():
        generate_at_once(logs, Mix(), AtOnce(arguments.queries, arguments.clicks))
    print(json.dumps(describe_machine()))
    spark = ["--master", arguments.master, "--driver-memory", arguments.driver_memory]
    done: dict[str, dict[str, float]] = {}
    if arguments.only != "backfill":
        done["plain Spark join"] = measured(
            ["benchmarks.backfill", "--plain", str(logs), str(fresh(arguments.dir, "plain")), *spark], []
        )
    if arguments.only != "plain":
        done["photon backfill"] = backfill(
            logs,
            fresh(arguments.dir, "backfill"),
            arguments.dir,
            [*spark, *(["--config", arguments.config] if arguments.config else [])],
        )
    for name, figures in done.items():
        print(f"{name:<20}" + "".join(f"{what} {value:>8.1f}   " for what, value in figures.items()))
    if len(done) == 2:
        ours, theirs = done["photon backfill"], done["plain Spark join"]
        print("ratio" + " " * 15 + "".join(f"{what} {ours[what] / theirs[what]:>8.2f}   " for what in theirs))


def backfill(logs: Path, out: Path, directory: Path, spark: list[str]) -> dict[str, float]:
    with Cluster(directory / "registry") as cluster:
        replicas = [process.pid for process in cluster._processes.values()]
        where = ["--registry", ",".join(cluster.addresses), "--out", str(out)]
        which = ["--primary", str(logs / "queries"), "--foreign", str(logs / "clicks")]
        figures = measured(["photon.app.cli", "backfill", "--json", *which, *where, *spark], replicas)
    truth = json.loads((logs / "truth.json").read_text())
    problems = check_pairs(out / "joined").problems(
        truth["distinct_joined_pairs"], truth["joined_pairs_sha256"]
    )
    assert not problems, problems
    return figures


def measured(module: list[str], others: list[int]) -> dict[str, float]:
    """Seconds, and CPU seconds of the processes of `python -m module`, and of `others` (process ids)."""
    command = [sys.executable, "-m", *module]
    clock = SystemClock()
    began = clock.monotonic()
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL)
    ended = threading.Event()
    seen: dict[int, float] = {}
    before = {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in others}

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            for one in family(process.pid):
                try:
                    seen[one.pid] = sum(one.cpu_times()[:2])
                except psutil.Error:
                    continue

    sampler = threading.Thread(target=sample)
    sampler.start()
    status = process.wait()
    seconds = clock.monotonic() - began
    ended.set()
    sampler.join()
    if status:
        raise SystemExit(f"{command} ended with {status}")
    registry = sum(sum(psutil.Process(pid).cpu_times()[:2]) - before[pid] for pid in others)
    return {
        "seconds": seconds,
        "cpu": sum(seen.values()) + registry,
        **({"registry": registry} if others else {}),
    }


def family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def fresh(directory: Path, name: str) -> Path:
    path = directory / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def plain(logs: Path, out: str, master: str, driver_memory: str) -> None:
    from pyspark.sql import functions as F

    from spark.engine.session import open_session

    began = time.monotonic()
    with open_session(master, driver_memory) as session:

        def lines(kind: str) -> Any:
            return session.read.option("lineSep", "\n").text(str((logs / kind).absolute()))

        queries = lines("queries").select(
            F.get_json_object("value", "$.id").alias("id"), F.col("value").alias("query")
        )
        clicks = lines("clicks").select(
            F.get_json_object("value", "$.primary_id").alias("id"), F.col("value").alias("click")
        )
        joined = clicks.join(queries, "id").select(
            F.concat(
                F.expr("substring(click, 1, length(click) - 1)"),
                F.lit(',"primary":'),
                F.col("query"),
                F.lit("}"),
            ).alias("value")
        )
        joined.write.text(str(Path(out).absolute()))
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
