"""Asks every process of a topology for its status; one that does not answer is left out, not waited for."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from photon.app.topology import Topology
from photon.wire import (
    dispatcher_pb2,
    dispatcher_pb2_grpc,
    eventstore_pb2,
    eventstore_pb2_grpc,
    idregistry_pb2,
    idregistry_pb2_grpc,
    joiner_pb2,
    joiner_pb2_grpc,
)
from photon.wire.rpc import open_channel

TIMEOUT_S: Final = 2.0

_KINDS: Final[dict[str, tuple[Any, Any]]] = {
    "registry": (idregistry_pb2_grpc.IdRegistryStub, idregistry_pb2.StatusRequest),
    "eventstore": (eventstore_pb2_grpc.EventStoreStub, eventstore_pb2.StatusRequest),
    "joiner": (joiner_pb2_grpc.JoinerStub, joiner_pb2.StatusRequest),
    "dispatcher": (dispatcher_pb2_grpc.DispatcherStub, dispatcher_pb2.StatusRequest),
}


class StatusReader:
    """Holds a channel to each process. Name -> last status, or None while it does not answer."""

    def __init__(self, topology: Topology) -> None:
        addresses = [("registry", r.name, r.grpc) for r in topology.replicas]
        for pipeline in topology.pipelines:
            addresses += [
                (role, pipeline.datacenter, getattr(pipeline, role))
                for role in ("eventstore", "joiner", "dispatcher")
            ]
        self._calls = {
            f"{role}-{name}": (_KINDS[role][0](open_channel(address)).Status, _KINDS[role][1]())
            for role, name, address in addresses
        }
        self._pool = ThreadPoolExecutor(len(self._calls), thread_name_prefix="status")
        self._last: dict[str, dict[str, Any] | None] = dict.fromkeys(self._calls)

    def read(
        self, roles: tuple[str, ...] = ("dispatcher", "eventstore", "joiner")
    ) -> tuple[list[dict[str, Any]], ...]:
        """Ask the processes of these roles at once; the lists, in this order, of those that answered."""
        chosen = [name for name in self._calls if name.startswith(roles)]
        for name, status in zip(chosen, self._pool.map(self._ask, chosen), strict=True):
            self._last[name] = status
        return tuple(
            [status for n in chosen if n.startswith(role) and (status := self._last[n])] for role in roles
        )

    def named(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and last status of each process that answered when last asked."""
        return ((name, status) for name, status in self._last.items() if status is not None)

    def silent(self) -> list[str]:
        return [name for name, status in self._last.items() if status is None]

    def registry_has_quorum(self) -> bool:
        (replicas,) = self.read(("registry",))
        return any(all(shard["has_quorum"] for shard in r["shards"]) for r in replicas)

    def _ask(self, name: str) -> dict[str, Any] | None:
        call, request = self._calls[name]
        try:
            status: dict[str, Any] = json.loads(call(request, timeout=TIMEOUT_S).json)
        except grpc.RpcError:
            return None
        return status
