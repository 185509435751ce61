"""The replicated log alone: three processes on loopback, synced to disk, batches of ids into a dict.

    python benchmarks/raft.py [--seconds 5] [--directory DIR]

Prints the machine, then for each size of batch and number in flight: ids/s, and the time from proposal to
outcome.
"""

import argparse
import json
import operator
import os
import platform
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import Applied, Outcome, ReplicatedLog

ROW_BYTES = 24
CASES = [(1, 1), (1, 16), (100, 4), (1_000, 1), (1_000, 16), (5_000, 16)]
WARM_S = 1.0


class IdSet:
    """First token wins; answers one byte an id."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}

    def apply(self, command: bytes) -> object:
        count = len(command) // ROW_BYTES
        tokens = struct.unpack_from(f"<{count}Q", command, 16 * count)
        ids = struct.unpack_from("16s" * count, command)
        return bytes(map(operator.eq, map(self.tokens.setdefault, ids, tokens), tokens))

    def freeze(self) -> Iterable[bytes]:
        ids, tokens = list(self.tokens), list(self.tokens.values())
        return (
            b"".join(ids[at : at + 50_000])
            + struct.pack(f"<{len(tokens[at : at + 50_000])}Q", *tokens[at : at + 50_000])
            for at in range(0, len(ids), 50_000)
        )

    def restore(self, chunks: Iterable[bytes]) -> None:
        self.tokens.clear()
        for chunk in chunks:
            self.apply(chunk)


class Load:
    """Keeps so many batches in flight, and notes how long each took."""

    def __init__(self) -> None:
        self.size = 0
        self.in_flight = 0
        self.until = 0.0
        self.counted_from = 0.0
        self.latencies: list[float] = []
        self.failed = 0
        self.token = 0

    def on_tick(self, log: ReplicatedLog) -> None:
        if not self.size or not log.is_leader:
            return
        if time.monotonic() >= self.until:
            if log.in_flight == 0:
                self.report()
            return
        while log.in_flight < self.in_flight:
            self.token += 1
            batch = os.urandom(16 * self.size) + struct.pack("<Q", self.token) * self.size
            log.propose(batch, self.answered(time.monotonic()))

    def answered(self, began: float) -> Callable[[Outcome], None]:
        def done(outcome: Outcome) -> None:
            now = time.monotonic()
            if not isinstance(outcome, Applied):
                self.failed += 1
            elif self.counted_from <= now < self.until:
                self.latencies.append(now - began)

        return done

    def report(self) -> None:
        latencies = sorted(self.latencies)
        seconds = self.until - self.counted_from
        count = len(latencies)
        print(
            json.dumps(
                {
                    "ids_per_s": round(count * self.size / seconds),
                    "p50_ms": round(latencies[count // 2] * 1e3, 2),
                    "p99_ms": round(latencies[count * 99 // 100] * 1e3, 2),
                    "failed": self.failed,
                }
            ),
            flush=True,
        )
        self.size, self.latencies, self.failed = 0, [], 0


def fail(error: BaseException) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


def node_main(name: str, directory: str, ports: list[str]) -> None:
    """One replica; reads `size in_flight seconds` lines, answers a line of figures where it leads."""
    addresses = {node: ("127.0.0.1", int(port)) for node, port in (pair.split("=") for pair in ports)}
    founders = list(addresses)
    load = Load()
    host = RaftHost(
        Endpoint(name, addresses.pop(name), b"benchmark"),
        addresses,
        Path(directory),
        rng=random.Random(),
        on_fatal=fail,
    )
    log = host.add_group(0, IdSet(), load.on_tick, founders)
    host.start()
    for line in sys.stdin:
        words = line.split()
        if words == ["leader?"]:
            print(json.dumps(log.is_leader), flush=True)
        elif words == ["cpu?"]:
            print(json.dumps(time.process_time()), flush=True)
        else:
            load.counted_from = time.monotonic() + WARM_S
            load.until = load.counted_from + float(words[2])
            load.in_flight = int(words[1])
            load.size = int(words[0])
            host.wake()
    host.stop()


class Nodes:
    def __init__(self, directory: Path) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        pairs = [f"{name}={sock.getsockname()[1]}" for name, sock in zip("abc", sockets, strict=True)]
        for sock in sockets:
            sock.close()
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--node", name, str(directory / name), *pairs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for name in "abc"
        ]

    def ask(self, process: "subprocess.Popen[str]", line: str) -> object:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + "\n")
        return json.loads(process.stdout.readline())

    def leader(self) -> "subprocess.Popen[str]":
        while True:
            for process in self.processes:
                if self.ask(process, "leader?"):
                    return process
            time.sleep(0.1)

    def cpu_seconds(self) -> float:
        return sum(float(str(self.ask(process, "cpu?"))) for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.communicate()


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        node_main(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--directory", default=None, help="where the replicas write (default: the temporary one)"
    )
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        nodes = Nodes(Path(directory))
        leader = nodes.leader()
        began = nodes.cpu_seconds()
        time.sleep(2.0)
        print(f"idle: {(nodes.cpu_seconds() - began) / 2.0 / 3 * 100:.1f} % of a core a node")
        print(
            f"{'batch':>6} {'in flight':>9} {'ids/s':>9} {'p50 ms':>7} {'p99 ms':>7} {'CPU us/id, all':>14}"
        )
        for size, in_flight in CASES:
            began = nodes.cpu_seconds()
            figures = nodes.ask(leader, f"{size} {in_flight} {arguments.seconds}")
            assert isinstance(figures, dict)
            used = nodes.cpu_seconds() - began
            ids = figures["ids_per_s"] * (arguments.seconds + WARM_S)
            print(
                f"{size:>6} {in_flight:>9} {figures['ids_per_s']:>9,} {figures['p50_ms']:>7} "
                f"{figures['p99_ms']:>7} {used / ids * 1e6:>14.2f}"
            )
        nodes.stop()


if __name__ == "__main__":
    main()
