"""Three real replica processes that can be killed and started again."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from idregistry.client import RegistryClient
from idregistry.rules.commands import Row
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError
from photon.rpc.servers import StatusClient
from tests.forked import Child
from tests.idregistry import replica
from tests.ports import free_ports
from tests.system import Processes
from tests.waiting import wait_until

NODES = ("r0", "r1", "r2")


class Cluster(Processes):
    """Same addresses and directories over all restarts."""

    def __init__(
        self,
        directory: Path,
        shards: int = 1,
        forget_after_s: float | None = None,
        seal_ids: int | None = None,
        **settings: Any,
    ) -> None:
        """`forget_after_s`: a lease that ran out so long ago; `seal_ids`: so many make a segment, where they
        are not as usual."""
        super().__init__(directory)
        self._forget_after_s = forget_after_s
        self._seal_ids = seal_ids
        self.grpc: dict[str, str] = {}
        self.raft: dict[str, int] = {}
        self.dialed = self.raft
        """Where the others reach each replica's log."""
        self._settings = {"shards": shards, **settings}
        self._joining: set[str] = set()
        self.sets: dict[str, str] = {}
        """Replica -> its set, where that is not the main one."""
        self._clients: list[RegistryClient] = []
        self._give_ports(*NODES)
        self._statuses: dict[str, StatusClient] = {}

    def _give_ports(self, *nodes: str) -> None:
        ports = free_ports(2 * len(nodes))
        for n, node in enumerate(nodes):
            self.grpc[node] = f"127.0.0.1:{ports[n]}"
            self.raft[node] = ports[len(nodes) + n]

    def move(self) -> None:
        """To other ports, while none runs."""
        self._give_ports(*NODES)
        self._statuses.clear()

    def start(self, *nodes: str) -> None:
        for node in nodes or NODES:
            known = {*NODES, *self.sets, node}
            given = {
                "node": node,
                "grpc": {name: address for name, address in self.grpc.items() if name in known},
                "raft": self.raft[node],
                "dialed": {name: port for name, port in self.dialed.items() if name in known},
                "directory": str(self.directory / node),
                "log": str(self.log(node)),
                "settings": self._settings,
                "joining": node in self._joining,
                "sets": self.sets,
                "forget_after_s": self._forget_after_s,
                "seal_ids": self._seal_ids,
            }
            self._processes[node] = Child(replica.main, given, told=self.log(node))

    def join(self, node: str) -> tuple[str, str]:
        """Start an empty replica, which waits for another's place; its addresses: of its log, and gRPC."""
        self._give_ports(node)
        self._joining.add(node)
        self.start(node)
        return f"127.0.0.1:{self.raft[node]}", self.grpc[node]

    def add_set(self, name: str) -> list[str]:
        """Three replicas of a new set, started, before the directory knows them."""
        nodes = [f"{name}{number}" for number in range(3)]
        self._give_ports(*nodes)
        self.sets |= dict.fromkeys(nodes, name)
        self.start(*nodes)
        return nodes

    def rows(self, *nodes: str) -> list[Row]:
        return [Row(node, "127.0.0.1", self.raft[node], self.grpc[node], self.sets[node]) for node in nodes]

    def lose(self, node: str) -> None:
        """The machine is gone, disk and all."""
        self.kill(node)
        shutil.rmtree(self.directory / node)

    def close(self) -> None:
        for client in (*self._clients, *self._statuses.values()):
            client.close()
        self.kill()

    def client(self, timeout_s: float = 15.0, nodes: Sequence[str] = NODES) -> RegistryClient:
        """One that knows these nodes only."""
        addresses = [self.grpc[node] for node in nodes]
        client = RegistryClient(addresses, timeout_s, SystemClock(), random.Random())
        self._clients.append(client)
        return client

    def shard_status(self, node: str, shard: int = 0) -> dict[str, Any]:
        """Empty while the replica does not answer."""
        try:
            shards = self.status(node)["shards"]
        except UnavailableError:
            return {}
        return next((status for status in shards if status["shard"] == shard), {})

    def status(self, node: str) -> dict[str, Any]:
        """All it says. UnavailableError."""
        if node not in self._statuses:
            self._statuses[node] = StatusClient("registry", self.grpc[node], 2.0)
        return self._statuses[node].status()

    def leader(self, shard: int = 0) -> str:
        """The node that leads, once there is one."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [n for n in self.running if self.shard_status(n, shard).get("is_leader")]
            return len(found) == 1

        wait_until(look)
        return found[0]
