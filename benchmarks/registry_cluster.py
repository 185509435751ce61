"""Three registry replicas as processes of this machine, their clients' addresses, who leads, what they used.

With `delay_ms` each replica's Raft port is reached only through a delay proxy: the address its peers dial is
the proxy's.
"""

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.registry_processes import BenchmarkError, Child, cpu_seconds, end, start_module
from idregistry.client import RegistryClient
from photon.app.ports import free_ports
from photon.core.clock import SystemClock
from photon.core.errors import PhotonError
from photon.core.tokens import Token

NODES = ("r0", "r1", "r2")
_READY_S = 60.0
_POLL_S = 0.02
_STATUS_S = 2.0


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
        ports = free_ports(3 * len(NODES), random.Random())
        self.grpc = {node: f"127.0.0.1:{ports.pop()}" for node in NODES}
        self._listen = {node: ports.pop() for node in NODES}
        self._dialed = {node: ports.pop() for node in NODES} if delay_ms else self._listen
        self._delay_ms = delay_ms
        self.settings = dict(settings or {})
        self._clock = None if clock is None else dict(clock)
        self._parent = directory
        self._directory = Path()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._proxy: Child | None = None
        self._statuses = connect(self.addresses, _STATUS_S)

    @property
    def addresses(self) -> list[str]:
        """gRPC, one a replica."""
        return list(self.grpc.values())

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="registry-", dir=self._parent))
        try:
            if self._delay_ms:
                ways = [[self._dialed[node], self._listen[node]] for node in NODES]
                self._proxy = Child("benchmarks.wan_proxy", {"delay_ms": self._delay_ms, "ways": ways})
                self._proxy.hear()
            for node in NODES:
                self.start(node)
            self._wait_until_ready()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._close()

    def start(self, node: str) -> None:
        """Start a replica that is down."""
        replica = {
            "node": node,
            "grpc": self.grpc,
            "raft_listen": self._listen[node],
            "raft_dialed": self._dialed[node],
            "raft_peers": {peer: port for peer, port in self._dialed.items() if peer != node},
            "directory": str(self._directory / node),
            "settings": self.settings,
            "clock": self._clock,
        }
        # What replicas say of each other while they start and die is not the measurement's matter.
        log = (self._directory / f"{node}.log").open("a")
        with log:
            self._processes[node] = start_module("benchmarks.registry_replica", replica, stderr=log)

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

    def status(self, node: str, shard: int = 0) -> dict[str, Any]:
        """The same of one shard."""
        return next((one for one in self.shards(node) if one["shard"] == shard), {})

    def leader(self, shard: int = 0) -> str:
        """The node that leads, once there is one."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            leading = [node for node in self._processes if self.status(node, shard).get("is_leader")]
            if len(leading) == 1:
                return leading[0]
            time.sleep(_POLL_S)
        raise BenchmarkError(f"no leader within {_READY_S:g} s: {self._last_words()}")

    def wait_until_settled(self, seconds: float) -> None:
        """Until nobody else led for so long: a replica that comes back may be handed the lead it had."""
        deadline = time.monotonic() + _READY_S
        seen, since = "", time.monotonic()
        while time.monotonic() < deadline:
            leader = self.leader()
            if leader != seen:
                seen, since = leader, time.monotonic()
            if time.monotonic() - since >= seconds:
                return
            time.sleep(5 * _POLL_S)
        raise BenchmarkError(f"the lead changed hands for {_READY_S:g} s: {self._last_words()}")

    def commit_index(self, node: str, shard: int = 0) -> int:
        """Raft entries committed so far, as `node` knows."""
        return int(self.status(node, shard).get("commit_index", 0))

    def wait_until_even(self, shard: int = 0) -> None:
        """Until all replicas run and none lags."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            applied = [self.status(node, shard).get("applied_index", -1) for node in NODES]
            if min(applied) >= 0 and max(applied) - min(applied) < 100:
                return
            time.sleep(_POLL_S)
        raise BenchmarkError(f"a replica did not catch up within {_READY_S:g} s: {self._last_words()}")

    def cpu(self, leader: str) -> dict[str, float]:
        """Seconds used so far: the leader, each follower, the proxy."""
        pids = {
            "leader" if node == leader else f"follower_{node}": process.pid
            for node, process in self._processes.items()
        }
        if self._proxy is not None:
            pids["proxy"] = self._proxy.pid
        return dict(zip(pids, cpu_seconds(pids.values()), strict=True))

    def _wait_until_ready(self) -> None:
        client = connect(self.addresses, _READY_S)
        try:
            # Several rounds, or the first measured call would pay for the last connections.
            for time_us in range(10):
                token = Token("127.0.0.1:7000", 0, time_us).pack()
                client.commit(os.urandom(16 * 64), bytes(8 * 64), token)
        except PhotonError as error:
            raise BenchmarkError(f"the replicas do not serve: {error}; {self._last_words()}") from error
        finally:
            client.close()
        self.wait_until_even()

    def _last_words(self) -> str:
        lines = [line for node in NODES for line in self._log(node)[-3:]]
        return "; ".join(lines) or "they said nothing"

    def _log(self, node: str) -> list[str]:
        with contextlib.suppress(OSError):
            return (self._directory / f"{node}.log").read_text("utf-8").splitlines()
        return []

    def _close(self) -> None:
        self._statuses.close()
        for process in self._processes.values():
            end(process)
        if self._proxy is not None:
            self._proxy.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def connect(addresses: list[str], timeout_s: float) -> RegistryClient:
    """A client, `addresses` with the nearest first."""
    return RegistryClient(addresses, timeout_s, SystemClock(), random.Random())
