"""Three registry replicas of this machine, each a `photon registry serve`: who leads, what they used.

With `delay_ms` each replica's Raft port is reached only through a toxiproxy, whose address its peers dial.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from benchmarks.measuring import BenchError, cpu_seconds
from idregistry.client import RegistryClient
from photon.cluster.launching import child_environment
from photon.cluster.ports import free_ports
from photon.cluster.supervisor import last_message
from photon.cluster.topology import Replica, Topology, write_topology
from photon.core.clock import SystemClock
from photon.core.errors import PhotonError
from photon.core.ids import Token

T = TypeVar("T")

NODES: Final = ("r0", "r1", "r2")
_READY_S: Final = 60.0
_POLL_S: Final = 0.02
_STATUS_S: Final = 2.0


class Cluster:
    """Starts when entered; killed and its files deleted when left."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        delay_ms: float = 0.0,
        command: Sequence[str] = ("photon.cli.main",),
    ) -> None:
        """`command`: the module that takes photon's arguments, and what comes before them."""
        ports = free_ports(2 * len(NODES), random.Random())
        self.grpc = {node: f"127.0.0.1:{ports.pop()}" for node in NODES}
        self.addresses = list(self.grpc.values())
        self._raft = {node: ports.pop() for node in NODES}
        self._delay_ms = delay_ms
        self._settings = dict(settings or {})
        self._command = command
        self._parent = directory
        self._directory = Path()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(
                prefix="registry-", dir=self._parent, ignore_cleanup_errors=True
            )
            self._directory = Path(stack.enter_context(scratch)).absolute()
            self._statuses = stack.enter_context(closing(connect(self.addresses, _STATUS_S)))
            stack.callback(lambda: [self.kill(node) for node in tuple(self._processes)])
            dialed = _delayed(stack, self._raft, self._delay_ms) if self._delay_ms else self._raft
            write_topology(self._topology(dialed), self._directory / "topology.json")
            for node in NODES:
                self.start(node)
            self._wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _topology(self, dialed: Mapping[str, int]) -> Topology:
        replicas = [
            Replica(
                node,
                self.grpc[node],
                "127.0.0.1",
                dialed[node],
                str(self._directory / node),
                listen_raft=f"127.0.0.1:{self._raft[node]}",
            )
            for node in NODES
        ]
        return Topology({"registry": self._settings}, [], [], "", os.urandom(16).hex(), False, replicas, [])

    def start(self, node: str) -> None:
        """Start a replica that is down."""
        serve = ["registry", "serve", "--topology", str(self._directory / "topology.json"), "--name", node]
        # What replicas say of each other while they start and die is not the measurement's matter.
        with (self._directory / f"{node}.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", *self._command, *serve], env=child_environment(), stderr=log
            )

    def kill(self, node: str) -> float:
        """SIGKILL; the moment of it, by the monotonic clock."""
        process = self._processes.pop(node)
        at = time.monotonic()
        process.kill()
        process.wait()
        return at

    def shards(self, node: str) -> list[dict[str, Any]]:
        """What a replica says of each of its shards; empty while it does not answer."""
        with suppress(PhotonError):
            shards: list[dict[str, Any]] = self._statuses.status(self.grpc[node])["shards"]
            return shards
        return []

    def status(self, node: str) -> dict[str, Any]:
        """The same of shard 0."""
        return next((one for one in self.shards(node) if one["shard"] == 0), {})

    def leader(self) -> str:
        """The node that leads shard 0, once there is one."""

        def leading() -> str | None:
            found = [node for node in self._processes if self.status(node).get("is_leader")]
            return found[0] if len(found) == 1 else None

        return self._until(leading, "no leader")

    def wait_until_settled(self, seconds: float) -> None:
        """Until nobody else led for this long: a replica that comes back may be handed the lead it had."""
        seen = ("", 0.0)

        def settled() -> bool | None:
            nonlocal seen
            leader = self.leader()
            if leader != seen[0]:
                seen = (leader, time.monotonic())
            return time.monotonic() - seen[1] >= seconds or None

        self._until(settled, "the lead changed hands")

    def commit_index(self, node: str) -> int:
        """Raft entries committed so far, as `node` knows."""
        return int(self.status(node).get("commit_index", 0))

    def wait_until_even(self) -> None:
        """Until all replicas run and none lags."""

        def even() -> bool | None:
            applied = [self.status(node).get("applied_index", -1) for node in NODES]
            return (min(applied) >= 0 and max(applied) - min(applied) < 100) or None

        self._until(even, "a replica did not catch up")

    def cpu(self, leader: str) -> dict[str, float]:
        """Seconds used so far: the leader, the followers."""
        followers = [process.pid for node, process in self._processes.items() if node != leader]
        return {
            "leader": cpu_seconds([self._processes[leader].pid]),
            "followers": cpu_seconds(followers),
        }

    def _wait_until_ready(self) -> None:
        with closing(connect(self.addresses, _READY_S)) as client:
            try:
                # Several rounds, or the first measured call would pay for the last connections.
                for time_us in range(10):
                    token = Token("127.0.0.1:7000", 0, time_us).pack()
                    client.commit(os.urandom(16 * 64), bytes(8 * 64), token)
            except PhotonError as error:
                raise BenchError(f"the replicas do not serve: {error}; {self._last_words()}") from error
        self.wait_until_even()

    def _until(self, found: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            value = found()
            if value is not None:
                return value
            time.sleep(_POLL_S)
        raise BenchError(f"{what} within {_READY_S:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        return "; ".join(last_message(log) for log in sorted(self._directory.glob("*.log")))


def connect(addresses: Sequence[str], timeout_s: float) -> RegistryClient:
    """A client, `addresses` with the nearest first."""
    return RegistryClient(list(addresses), timeout_s, SystemClock(), random.Random())


def has_toxiproxy() -> bool:
    """Whether there can be long links: the server and the test suite's requirements are here."""
    try:
        from tests.faults.kit.toxiproxy import toxiproxy_binary
    except ImportError:
        return False
    return toxiproxy_binary() is not None


def _delayed(stack: ExitStack, ports: Mapping[str, int], delay_ms: float) -> dict[str, int]:
    """Node -> a port that leads to its own, later. ToxiproxyError if there is no server."""
    from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy

    proxies = stack.enter_context(closing(ToxiproxyServer(need_toxiproxy())))
    listens = proxies.create({node: f"127.0.0.1:{port}" for node, port in ports.items()}, ports.values())
    for node in ports:
        for stream in ("upstream", "downstream"):
            proxies.add(node, "latency", stream, {"latency": round(delay_ms)}, 1.0)
    return {node: int(address.rpartition(":")[2]) for node, address in listens.items()}
