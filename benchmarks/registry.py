"""The registry through gRPC: three replica processes on loopback, fsync on, one client process (this one).

    python benchmarks/registry.py [--seconds 3] [--shards 1] [--json]

Prints the machine, ids a second with the latency of a commit for several batch sizes and numbers of client
threads, the same for lookups, and a lone commit while idle. The CPU figure is all four processes' together.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from idregistry.client import RegistryClient
from idregistry.server import RegistryServer
from photon.core.clock import SystemClock
from photon.core.columns import pack_times
from photon.core.errors import PhotonError
from photon.core.settings import Registry
from photon.wire.rpc import on_termination

REPLICAS = ("r0", "r1", "r2")
RUNS = ((1, 1), (1, 8), (100, 8), (1_000, 4), (1_000, 8), (4_000, 4), (4_000, 8))  # ids a batch, threads
SECRET = b"benchmark"
START_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        serve(**json.loads(arguments.replica))
        return
    directory = Path(tempfile.mkdtemp(prefix="photon-bench-registry-"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        addresses = start_replicas(directory, arguments.shards, processes)
        report = measure(addresses, arguments.shards, arguments.seconds, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))


def serve(node: str, grpc: dict[str, str], raft: dict[str, int], directory: str, shards: int) -> None:
    """One replica, until SIGTERM or until the parent is gone."""
    stop = threading.Event()
    on_termination(stop.set)
    server = RegistryServer(
        Registry(shards=shards),
        node,
        grpc[node],
        ("127.0.0.1", raft[node]),
        {name: ("127.0.0.1", port) for name, port in raft.items() if name != node},
        grpc,
        Path(directory),
        SECRET,
        SystemClock(),
        random.Random(),
        lambda error: (print(f"{node}: {error!r}", file=sys.stderr), os.kill(os.getpid(), signal.SIGKILL)),
    )
    server.start()
    parent = os.getppid()
    while not stop.wait(0.5) and os.getppid() == parent:
        pass
    server.stop()


def start_replicas(directory: Path, shards: int, processes: list[subprocess.Popen[bytes]]) -> list[str]:
    """Start the three; their gRPC addresses."""
    ports = free_ports(2 * len(REPLICAS))
    grpc = {node: f"127.0.0.1:{ports.pop()}" for node in REPLICAS}
    raft = {node: ports.pop() for node in REPLICAS}
    for node in REPLICAS:
        replica = {
            "node": node,
            "grpc": grpc,
            "raft": raft,
            "directory": str(directory / node),
            "shards": shards,
        }
        processes.append(subprocess.Popen([sys.executable, __file__, "--replica", json.dumps(replica)]))
    return list(grpc.values())


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def measure(
    addresses: list[str], shards: int, seconds: float, processes: list[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    client = RegistryClient(addresses, shards, 10.0, SystemClock(), random.Random())
    wait_until_ready(client)
    time.sleep(1.0)
    measured = [psutil.Process(process.pid) for process in processes] + [psutil.Process()]
    report: dict[str, Any] = {"machine": machine(), "shards": shards, "idle_commit_ms": idle(client)}
    report["commit"] = [run(client.commit, k, t, seconds, measured, commit=True) for k, t in RUNS]
    report["lookup"] = [run(client.lookup, k, t, seconds, measured, commit=False) for k, t in RUNS[3:]]
    report["rss_mb"] = [process.memory_info().rss >> 20 for process in measured[:-1]]
    client.close()
    return report


def wait_until_ready(client: RegistryClient) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            for _ in range(20):
                client.commit(os.urandom(16 * 64), bytes(8 * 64), os.urandom(16))
            return
        except PhotonError:
            if time.monotonic() > deadline:
                raise


def idle(client: RegistryClient, count: int = 150) -> dict[str, float]:
    """A lone commit of one id every 20 ms."""
    latencies = []
    for _ in range(count):
        time.sleep(0.02)
        start = time.perf_counter()
        client.commit(os.urandom(16), pack_times([time.time_ns() // 1000]), os.urandom(16))
        latencies.append(time.perf_counter() - start)
    return percentiles(latencies)


def run(
    call: Callable[..., bytes], ids: int, threads: int, seconds: float, processes: list[Any], commit: bool
) -> dict[str, Any]:
    """`threads` threads that call with fresh ids one batch after the other."""
    latencies: list[float] = []
    failures: list[str] = []
    end = time.perf_counter() + seconds

    def work() -> None:
        while (start := time.perf_counter()) < end:
            times = pack_times([time.time_ns() // 1000] * ids)
            columns = (
                (os.urandom(16 * ids), times, os.urandom(16)) if commit else (os.urandom(16 * ids), times)
            )
            try:
                outcomes = call(*columns)
            except PhotonError as error:
                failures.append(str(error))
                continue
            assert outcomes == bytes(ids), "every id is new"
            latencies.append(time.perf_counter() - start)

    cpu = sum(sum(process.cpu_times()[:2]) for process in processes)
    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    cpu = sum(sum(process.cpu_times()[:2]) for process in processes) - cpu
    done = len(latencies) * ids
    return {
        "ids_a_batch": ids,
        "threads": threads,
        "ids_per_s": round(done / took),
        **percentiles(latencies),
        "cpu_us_per_id": round(cpu / max(1, done) * 1e6, 2),
        "failures": len(failures),
    }


def percentiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies) or [0.0]
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 2)
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99))
    }


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def as_text(report: dict[str, Any]) -> str:
    idle_ms, rss_mb = report["idle_commit_ms"], report["rss_mb"]
    lines = [
        f"machine: {report['machine']}; shards: {report['shards']}; replica RSS MB: {rss_mb}",
        f"idle, one id: p50 {idle_ms['p50_ms']} ms, p99 {idle_ms['p99_ms']} ms",
    ]
    for what in ("commit", "lookup"):
        for row in report[what]:
            lines.append(
                f"{what}: {row['ids_a_batch']:>5} ids x {row['threads']} threads: "
                f"{row['ids_per_s']:>9,} ids/s, p50 {row['p50_ms']:>7} ms, p99 {row['p99_ms']:>7} ms, "
                f"CPU {row['cpu_us_per_id']} us/id, {row['failures']} failures"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
