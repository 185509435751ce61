"""Replicas on fake logs behind real gRPC servers, and clients of them."""

import random
from types import SimpleNamespace
from typing import Any

import grpc

from idregistry.client import RegistryClient
from idregistry.coordinator import Coordinator
from idregistry.rules.commands import (
    IDENTITY_BYTES,
    Found,
    Row,
    encode,
)
from idregistry.rules.directory import DirectoryState, group_of
from idregistry.service import WORKERS, IdRegistryService
from idregistry.shard import Shard
from photon.core.clock import SystemClock
from photon.core.settings import Registry
from photon.rpc.idregistry_pb2_grpc import IdRegistryStub, add_IdRegistryServicer_to_server
from photon.rpc.network import LOOPBACK
from photon.rpc.servers import Server
from tests.idregistry.fake_log import FakeLog, Turner
from tests.waiting import wait_until


class Node:
    """A replica of all shards, on fake logs, behind a real gRPC server."""

    def __init__(
        self, name: str, shards: int, rows: dict[str, Row], founded: int | None = None, **settings: float
    ) -> None:
        self.turner = Turner()
        clock = SystemClock()
        parsed = Registry(shards=shards, **settings)  # type: ignore[arg-type]
        self.directory = DirectoryState()
        found = Found(1, founded or shards, (Row("r0", "h", 1, "h:1"),), b"i" * IDENTITY_BYTES)
        self.directory.apply(encode(found))
        self.hosted: dict[int, Shard] = {}
        for n in range(shards):
            shard = Shard(group_of(n, 0), parsed, clock, self.turner.wake, self.directory, lambda: None)
            shard.log = log = FakeLog(shard.state, node=name, _leader=None)
            self.turner.add(shard.on_tick, log)
            self.hosted[n] = shard
        hosting: Any = SimpleNamespace(rows=rows, shards=self.hosted, follow=lambda view: False, behind=False)
        coordinator = Coordinator(
            self.directory, found, parsed, clock, self.turner.wake, hosting, lambda: None
        )
        self.directory_log = FakeLog(self.directory, node=name, _leader=None)
        self.turner.add(coordinator.on_tick, self.directory_log)
        service = IdRegistryService(
            self.directory, self.directory_log, coordinator, hosting, clock, parsed.request_timeout_s
        )
        self.rpc = Server("127.0.0.1:0", WORKERS)
        self.rpc.add(add_IdRegistryServicer_to_server, service, "photon.idregistry.v1.IdRegistry")
        self.rpc.start()
        self.turner.start()
        self.address = self.rpc.listen
        self._channel: grpc.Channel | None = None
        rows[name] = Row(name, "127.0.0.1", 1, self.address)

    @property
    def stub(self) -> IdRegistryStub:
        if self._channel is None:
            self._channel = LOOPBACK.open(self.address)
        return IdRegistryStub(self._channel)  # type: ignore[no-untyped-call]

    @property
    def shards(self) -> list[Shard]:
        return list(self.hosted.values())

    @property
    def logs(self) -> list[FakeLog]:
        return [one.log for one in self.hosted.values()]  # type: ignore[misc]

    def stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.rpc.stop(0.0)
        self.turner.close()


class Ensemble:
    """Nodes that know each other's addresses; a leader is appointed, nothing is replicated."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.clients: list[RegistryClient] = []
        self.rows: dict[str, Row] = {}

    def add(self, count: int, shards: int = 1, **settings: Any) -> list[Node]:
        self.nodes += [Node(f"r{n}", shards, self.rows, **settings) for n in range(count)]
        return self.nodes

    def lead(self, leader: str | None, shard: int = 0) -> None:
        """Appoint; a leader's shard is configured when this returns."""
        for node in self.nodes:
            node.logs[shard]._leader = leader
            node.turner.wake()
            if node.logs[shard].node == leader:
                state = node.shards[shard].state
                wait_until(lambda state=state: state.configuration is not None)  # type: ignore[misc]

    def leading(self, shards: int = 1, **settings: Any) -> Node:
        """One that leads all there is."""
        (node,) = self.add(1, shards, **settings)
        node.directory_log._leader = "r0"
        for shard in range(shards):
            self.lead("r0", shard)
        return node

    def client(self, timeout_s: float = 5.0, *others: str) -> RegistryClient:
        """Of all nodes, after the `others` at these addresses."""
        addresses = [*others, *(node.address for node in self.nodes)]
        self.clients.append(RegistryClient(addresses, timeout_s, SystemClock(), random.Random(1)))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes:
            node.stop()
