"""Latency of a live system: from a click's line written to its joined line readable, as a reader sees it."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.join_runs import following, fresh
from benchmarks.processes import BenchError, ProcessTree
from photon.cluster.topology import read_topology
from photon.dev.feeder import Fed, Feed
from photon.dev.pairs import check_pairs

WARM_UP_S: Final = 5.0
LOOK_S: Final = 0.001
LOOK_FOR_FILES_S: Final = 0.02
_READ_BYTES: Final = 4 << 20
CATCH_UP_S_MAX: Final = 120.0


class _Click(msgspec.Struct, gc=False):
    ts_us: int


_CLICKS: Final = msgspec.json.Decoder(_Click)


def live(
    directory: Path, seconds: float, queries_per_s: float, clicks_per_s: float, fast_path: bool = False
) -> dict[str, Any]:
    """Feed a running system at this rate; latencies of the clicks after a warm-up. Its output is checked.

    The latency counts from the event's own time, taken before its line is written. BenchError if a click
    was lost or joined twice, or if the feeder could not keep the rate.
    """
    logs, out = fresh(directory / "live-logs"), fresh(directory / "live")
    for name in ("queries", "clicks"):
        (logs / name).mkdir()
    with following(logs, out) as pid:
        plan = _plan(logs, out, seconds + WARM_UP_S, queries_per_s, clicks_per_s, fast_path)
        tree = ProcessTree(pid)
        warm_us = time.time_ns() // 1_000 + round(WARM_UP_S * 1e6)
        reader = _OutputReader(out, warm_us)
        feeder = subprocess.Popen(
            [sys.executable, "-m", "photon.dev.feeder", json.dumps(asdict(plan))],
            stdout=subprocess.PIPE,
        )
        said, _ = feeder.communicate()
        if feeder.returncode != 0:
            raise BenchError(f"the feeder ended with status {feeder.returncode}")
        fed = Fed(**json.loads(said))
        reader.wait_for(fed.clicks)
        latencies = reader.stop()
        usage = tree.stop()
    _check(out, fed)
    return {
        "queries_per_s": round(fed.queries / fed.seconds),
        "clicks_per_s": round(fed.clicks / fed.seconds),
        "joined": fed.clicks,
        **_percentiles(latencies),
        "feeder_late_ms": fed.late_ms,
        "cpu_cores": round(sum(usage.cpu_s.values()) / fed.seconds, 2),
        **({"fast_path": fed.fast_path} if fast_path else {}),
    }


def _plan(
    logs: Path, out: Path, seconds: float, queries_per_s: float, clicks_per_s: float, fast_path: bool
) -> Feed:
    plan = Feed([str(logs)], queries_per_s, clicks_per_s, seed=1, seconds=seconds)
    if not fast_path:
        return plan
    pipeline = read_topology(out / ".photon" / "topology.json").pipelines[0]
    return replace(plan, eventstore=pipeline.eventstores[0], joiners=list(pipeline.joiners))


def _percentiles(latencies_us: list[int]) -> dict[str, float]:
    if not latencies_us:
        raise BenchError("nothing was joined live after the warm-up")
    at = np.percentile(np.array(latencies_us), [50, 90, 99, 100]) / 1_000
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    return {name: round(float(value), 1) for name, value in zip(names, at, strict=True)}


def _check(out: Path, fed: Fed) -> None:
    """Every click once, with the query it names."""
    report = check_pairs(out / "joined")
    wrong = report.repeated or report.mismatched or report.unreadable
    if wrong or report.lines != fed.clicks:
        raise BenchError(
            f"the live output is wrong: {report.lines:,} joined lines for {fed.clicks:,} clicks, "
            f"{report.repeated:,} repeated, {report.mismatched:,} with another query, "
            f"{report.unreadable:,} unreadable; the system was slower than it was fed, or lost events"
        )


class _OutputReader:
    """Reads the joined logs as they grow, in a thread; notes how late each click from `from_us` on came."""

    def __init__(self, out: Path, from_us: int) -> None:
        self._directory = out / "joined"
        self._from_us = from_us
        self._logs: dict[Path, tuple[FileIO, bytes]] = {}
        """Path -> its file, and the line that was only begun."""
        self._latencies: list[int] = []
        self._seen = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def wait_for(self, clicks: int) -> None:
        """Return when so many lines were read. BenchError if they don't come."""
        deadline = time.monotonic() + CATCH_UP_S_MAX
        while self._seen < clicks:
            if time.monotonic() >= deadline:
                raise BenchError(
                    f"{self._seen:,} of {clicks:,} clicks were joined {CATCH_UP_S_MAX:.0f} s after the last "
                    "one was written"
                )
            time.sleep(0.05)

    def stop(self) -> list[int]:
        self._stopping.set()
        self._thread.join()
        return self._latencies

    def _run(self) -> None:
        look_at = float("-inf")
        try:
            while not self._stopping.wait(LOOK_S):
                if time.monotonic() >= look_at:
                    for path in self._directory.rglob("*.jsonl"):
                        if path not in self._logs:
                            self._logs[path] = (path.open("rb", buffering=0), b"")
                    look_at = time.monotonic() + LOOK_FOR_FILES_S
                for path, (file, begun) in self._logs.items():
                    whole, _, rest = (begun + file.read(_READ_BYTES)).rpartition(b"\n")
                    self._logs[path] = (file, rest)
                    self._take(whole)
        finally:
            for file, _ in self._logs.values():
                file.close()

    def _take(self, lines: bytes) -> None:
        if lines:
            now_us = time.time_ns() // 1_000
            times = [click.ts_us for click in _CLICKS.decode_lines(lines)]
            self._latencies += [now_us - t for t in times if t >= self._from_us]
            self._seen += len(times)
