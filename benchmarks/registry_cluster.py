"""Three registry replicas as processes of this machine, their clients' addresses, who leads, what they used.

    python -m benchmarks.registry_cluster JSON      (a replica)

With `delay_ms` each replica's Raft port is reached only through a toxiproxy, whose address its peers dial.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from benchmarks.processes import BenchError, cpu_seconds, end, start_module
from idregistry.client import RegistryClient
from idregistry.server import RegistryServer
from photon.cluster.placing import free_ports
from photon.cluster.supervisor import die_with_parent
from photon.core.clock import SystemClock
from photon.core.errors import PhotonError
from photon.core.ids import Token
from photon.core.settings import parse_settings
from photon.rpc.servers import on_termination

T = TypeVar("T")

MODULE: Final = "benchmarks.registry_cluster"
NODES: Final = ("r0", "r1", "r2")
_READY_S: Final = 60.0
_POLL_S: Final = 0.02
_STATUS_S: Final = 2.0


class FastClock(SystemClock):
    """`speed` seconds of wall time a second since `began_s` (Unix time); leases and time-outs are real."""

    def __init__(self, speed: float, began_s: float) -> None:
        self._speed = speed
        self._began_s = began_s

    def now_us(self) -> int:
        return int((self._began_s + (time.time() - self._began_s) * self._speed) * 1e6)


class Cluster:
    """Starts when entered; killed and its files deleted when left."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        delay_ms: float = 0.0,
        clock: Mapping[str, float] | None = None,
    ) -> None:
        """`clock`: arguments of a FastClock that the replicas go by."""
        ports = free_ports(2 * len(NODES), random.Random())
        self.grpc = {node: f"127.0.0.1:{ports.pop()}" for node in NODES}
        self.addresses = list(self.grpc.values())
        self._listen = {node: ports.pop() for node in NODES}
        self._dialed = self._listen
        self._delay_ms = delay_ms
        self._settings = dict(settings or {})
        self._clock = clock
        self._parent = directory
        self._directory = Path()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._stack = ExitStack()
        self._statuses = connect(self.addresses, _STATUS_S)

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(
                prefix="registry-", dir=self._parent, ignore_cleanup_errors=True
            )
            self._directory = Path(stack.enter_context(scratch))
            stack.callback(self._statuses.close)
            stack.callback(self._end_all)
            if self._delay_ms:
                self._dialed = _delayed(stack, self._listen, self._delay_ms)
            for node in NODES:
                self.start(node)
            self._wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _end_all(self) -> None:
        for process in self._processes.values():
            end(process)

    def start(self, node: str) -> None:
        """Start a replica that is down."""
        replica = {
            "node": node,
            "grpc": self.grpc,
            "raft_listen": self._listen[node],
            "raft_dialed": self._dialed[node],
            "raft_peers": {peer: port for peer, port in self._dialed.items() if peer != node},
            "directory": str(self._directory / node),
            "settings": self._settings,
            "clock": self._clock,
        }
        # What replicas say of each other while they start and die is not the measurement's matter.
        with (self._directory / f"{node}.log").open("a") as log:
            self._processes[node] = start_module(MODULE, replica, stderr=log)

    def kill(self, node: str) -> float:
        """SIGKILL; the moment of it, by the monotonic clock."""
        process = self._processes.pop(node)
        at = time.monotonic()
        end(process)
        return at

    def shards(self, node: str) -> list[dict[str, Any]]:
        """What a replica says of each of its shards; empty while it does not answer."""
        with contextlib.suppress(PhotonError):
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
        used = {"leader": 0.0, "followers": 0.0}
        for node, process in self._processes.items():
            used["leader" if node == leader else "followers"] += cpu_seconds([process.pid])
        return used

    def _wait_until_ready(self) -> None:
        client = connect(self.addresses, _READY_S)
        try:
            # Several rounds, or the first measured call would pay for the last connections.
            for time_us in range(10):
                token = Token("127.0.0.1:7000", 0, time_us).pack()
                client.commit(os.urandom(16 * 64), bytes(8 * 64), token)
        except PhotonError as error:
            raise BenchError(f"the replicas do not serve: {error}; {self._last_words()}") from error
        finally:
            client.close()
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
        logs = sorted(self._directory.glob("*.log"))
        return "; ".join(line for log in logs for line in log.read_text("utf-8").splitlines()[-3:])


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

    proxies = ToxiproxyServer(need_toxiproxy())
    stack.callback(proxies.close)
    listens = proxies.create({node: f"127.0.0.1:{port}" for node, port in ports.items()}, ports.values())
    for node in ports:
        for stream in ("upstream", "downstream"):
            proxies.add(node, "latency", stream, {"latency": round(delay_ms)}, 1.0)
    return {node: int(address.rpartition(":")[2]) for node, address in listens.items()}


def _serve(replica: Mapping[str, Any]) -> None:
    node = replica["node"]
    stop = threading.Event()
    on_termination(stop.set)

    def fatal(error: BaseException) -> None:
        print(f"{node}: {error!r}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    server = RegistryServer(
        parse_settings({"registry": replica["settings"]}).registry,
        node,
        replica["grpc"][node],
        ("127.0.0.1", replica["raft_listen"]),
        {name: ("127.0.0.1", port) for name, port in replica["raft_peers"].items()},
        replica["grpc"],
        Path(replica["directory"]),
        b"benchmark",
        FastClock(**replica["clock"]) if replica["clock"] else SystemClock(),
        random.Random(),
        fatal,
        raft_dialed=("127.0.0.1", replica["raft_dialed"]),
    )
    server.start()
    stop.wait()
    server.stop()


def main() -> None:
    die_with_parent()
    _serve(json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
