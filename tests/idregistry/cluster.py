"""Three real replica processes that can be killed and started again."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from idregistry.client import RegistryClient
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError

ROOT = Path(__file__).parents[2]
NODES = ("r0", "r1", "r2")


class Cluster:
    """Same addresses and directories over all restarts."""

    def __init__(self, directory: Path, shards: int = 1, **settings: Any) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * len(NODES))]
        ports = [s.getsockname()[1] for s in sockets]
        for s in sockets:
            s.close()
        self.grpc = {node: f"127.0.0.1:{ports[n]}" for n, node in enumerate(NODES)}
        self._raft = {node: ports[len(NODES) + n] for n, node in enumerate(NODES)}
        self._directory = directory
        self._settings = {"shards": shards, **settings}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[RegistryClient] = []
        self._statuses = self.client(timeout_s=2.0)

    def start(self, *nodes: str) -> None:
        for node in nodes or NODES:
            replica = {
                "node": node,
                "grpc": self.grpc,
                "raft": self._raft,
                "directory": str(self._directory / node),
                "settings": self._settings,
            }
            command = [sys.executable, "-m", "tests.idregistry.replica", json.dumps(replica)]
            self._processes[node] = subprocess.Popen(command, cwd=ROOT)

    def kill(self, *nodes: str) -> None:
        """SIGKILL."""
        for node in nodes or tuple(self._processes):
            process = self._processes.pop(node)
            process.kill()
            process.wait()

    def terminate(self, node: str) -> int:
        """SIGTERM; its exit status."""
        process = self._processes.pop(node)
        process.terminate()
        return process.wait(15.0)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.kill()

    def pause(self, node: str) -> None:
        """SIGSTOP: alive for the kernel, dead for everybody else."""
        self._processes[node].send_signal(signal.SIGSTOP)

    def resume(self, node: str) -> None:
        self._processes[node].send_signal(signal.SIGCONT)

    def client(self, timeout_s: float = 15.0, nodes: Sequence[str] = NODES) -> RegistryClient:
        """One that knows these nodes only."""
        shards = self._settings["shards"]
        addresses = [self.grpc[node] for node in nodes]
        client = RegistryClient(addresses, shards, timeout_s, SystemClock(), random.Random())
        self._clients.append(client)
        return client

    def shard_status(self, node: str, shard: int = 0) -> dict[str, Any]:
        """Empty while the replica does not answer."""
        try:
            status: dict[str, Any] = self._statuses.status(self.grpc[node])["shards"][shard]
        except UnavailableError:
            return {}
        return status

    def leader(self, shard: int = 0) -> str:
        """The node that leads, once there is one."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [n for n in tuple(self._processes) if self.shard_status(n, shard).get("is_leader")]
            return len(found) == 1

        wait_until(look)
        return found[0]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
