"""What a scan costs those who commit meanwhile.

    python benchmarks/registry_scan.py [--ids 3000000] [--seconds 15] [--directory DIR]

Three replicas with fsync, and beside them commits of 1,000 ids, 25 a second: without a scan, and while fresh
scans of the leader follow one another. A latency counts from the moment at which its call was due.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.registry_cluster import Cluster, connect
from idregistry.client import RegistryClient
from photon.core.columns import pack_times
from photon.core.tokens import Token

FILL_IDS = 16_384
COMMIT_IDS = 1_000
RATE = 25.0
THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=3_000_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    with Cluster(arguments.directory) as cluster:
        client = connect(cluster.addresses, 15.0)
        for number in range(arguments.ids // FILL_IDS):
            commit(client, FILL_IDS, number)
        cluster.wait_until_even()
        print(f"load {os.getloadavg()[0]:.1f}; {arguments.ids:,} ids")
        report("commits alone", latencies_ms(client, arguments.seconds))
        scanner = Scanner(connect(cluster.addresses, 15.0))
        scanner.start()
        measured = latencies_ms(client, arguments.seconds)
        scanner.stopping = True
        scanner.join()
        report("commits beside scans", measured)
        each_us = scanner.cpu / scanner.ids * 1e6
        print(
            f"scans: {scanner.ids:,} ids in {scanner.seconds:.1f} s, {each_us:.2f} us an id of client's CPU"
        )


class Scanner(threading.Thread):
    """Scans until told, but at least once."""

    def __init__(self, client: RegistryClient) -> None:
        super().__init__()
        self._client = client
        self.stopping = False
        self.ids, self.seconds, self.cpu = 0, 0.0, 0.0

    def run(self) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        while not self.stopping or not self.ids:
            for piece in self._client.scan(0, fresh=True):
                self.ids += len(piece.ids) // 16
        self.seconds, self.cpu = time.monotonic() - began, time.thread_time() - cpu


def latencies_ms(client: RegistryClient, seconds: float) -> list[float]:
    """Of commits that are due at fixed moments."""
    begin = time.monotonic() + 0.1
    slots = iter(range(round(seconds * RATE)))
    measured: list[float] = []

    def work() -> None:
        for slot in slots:
            due = begin + slot / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            commit(client, COMMIT_IDS, slot)
            measured.append((time.monotonic() - due) * 1e3)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return measured


def commit(client: RegistryClient, count: int, number: int) -> None:
    token = Token("127.0.0.1:7000", random.getrandbits(63), number).pack()
    client.commit(os.urandom(16 * count), pack_times([time.time_ns() // 1000] * count), token)


def report(what: str, measured: list[float]) -> None:
    cuts = statistics.quantiles(measured, n=100)
    print(f"{what}: p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, longest {max(measured):.1f} ms")


if __name__ == "__main__":
    main()
