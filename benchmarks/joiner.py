"""CPU of the joiner an event, without gRPC: `python -m benchmarks.joiner`.

The registry and the event store answer at once, so what is measured is the joiner's own work: lookup's
outcomes, adapter, intent journal, joined log. CPU is that of the process (fdatasync's wait is no CPU).
"""

import argparse
import os
import platform
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from joiner.batch import ForeignColumns
from joiner.worker import Worker
from photon.core.clock import SystemClock
from photon.core.columns import join_lines, pack_times
from photon.core.fates import Committed, Found
from photon.core.settings import Settings

_BUDGET_US = 3.0


class InstantRegistry:
    """Every `lost_every`-th id is another's (0: none)."""

    def __init__(self, lost_every: int) -> None:
        self._lost_every = lost_every

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        outcomes = bytearray(len(times) // 8)
        if self._lost_every:
            outcomes[:: self._lost_every] = bytes([Committed.DUPLICATE]) * len(outcomes[:: self._lost_every])
        return bytes(outcomes)

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        """It always may."""


class InstantEventStore:
    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def lookup(self, ids: bytes, timeout_s: float | None = None) -> tuple[bytes, list[bytes]]:
        return bytes([Found.FOUND]) * len(self._lines), self._lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--batch", type=int, nargs="*", default=[256, 2_000, 4_000])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"
    )
    print(f"{'batch':>6} {'case':<22} {'us CPU/event':>12} {'events/s':>10}")
    for size in arguments.batch:
        for case, lost_every, fsync in [
            ("all won, no fsync", 0, False),
            ("all won, fsync", 0, True),
            ("every 2nd lost, fsync", 2, True),
        ]:
            cpu, wall = measure(arguments.events, size, arguments.threads, lost_every, fsync)
            note = "" if cpu <= _BUDGET_US or size < 2_000 else f"  over the budget of {_BUDGET_US} us"
            print(f"{size:>6} {case:<22} {cpu:>12.2f} {1e6 / wall:>10,.0f}{note}")


def measure(events: int, size: int, threads: int, lost_every: int, fsync: bool) -> tuple[float, float]:
    """CPU and wall time in us an event."""
    batch, primaries = make_batch(size)
    defaults = Settings()
    settings = replace(defaults, joiner=replace(defaults.joiner, fsync=fsync))
    with tempfile.TemporaryDirectory(dir=".") as root:
        worker = Worker(
            settings,
            "bench",
            "east",
            "127.0.0.1:1",
            Path(root) / "state",
            Path(root),
            InstantRegistry(lost_every),
            InstantEventStore(primaries),
            SystemClock(),
            random.Random(),
        )
        worker.start()
        batches = max(threads, events // size)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(worker.join, [batch] * threads))
            wall, cpu = time.perf_counter(), time.process_time()
            list(pool.map(worker.join, [batch] * batches))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        worker.close()
    done = batches * size
    return cpu / done * 1e6, wall / done * 1e6


def make_batch(size: int) -> tuple[ForeignColumns, list[bytes]]:
    """Clicks of about 110 bytes, queries of about 150."""
    rng = np.random.default_rng(7)
    foreign = [
        f'{{"id":"10.0.0.1:7:{1_700_000_000_000_000 + n}","primary_id":"10.0.0.2:9:{n}",'
        f'"url":"/a/{n}","position":{n % 9}}}'.encode()
        for n in range(size)
    ]
    primaries = [
        f'{{"id":"10.0.0.2:9:{n}","user":"u{n:09}","terms":"some words of a query {n}",'
        f'"results":[1,2,3,{n}],"language":"en"}}'.encode()
        for n in range(size)
    ]
    batch = ForeignColumns(
        rng.bytes(16 * size),
        rng.bytes(16 * size),
        pack_times(range(size)),
        join_lines(foreign),
        bytes(4 * size),
        bytes(8 * size),
    )
    return batch, primaries


if __name__ == "__main__":
    main()
