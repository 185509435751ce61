"""The gRPC faces of the EventStore: columns in, columns out, errors as status codes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import msgspec
import numpy as np

from eventstore.cache import CacheShare
from eventstore.filling import Filling, Members
from eventstore.lookup import EventLookup, bounded
from photon.core.addresses import mistake
from photon.core.clock import Clock
from photon.core.columns import join_lines, split_ids, split_lines
from photon.core.errors import PhotonError
from photon.core.fates import Found
from photon.core.ids import ID_BYTES
from photon.core.status import Histogram
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["EventStore"].full_name


@dataclass(frozen=True, slots=True)
class HomeParts:
    """What the home process's calls need."""

    lookup: EventLookup
    filling: Filling
    members: Members
    clock: Clock
    store: bytes
    virtual_nodes: int
    status: Callable[[], dict[str, Any]]


class EventStoreService(eventstore_pb2_grpc.EventStoreServicer):
    """Home: all calls (photon/rpc/eventstore.proto)."""

    def __init__(self, parts: HomeParts) -> None:
        self._parts = parts

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        parts = self._parts
        _check_ids(request.ids, context)
        try:
            outcomes, lines = parts.lookup.look_up(request.ids, missed=request.missed)
        except PhotonError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.LookupResponse(outcomes=outcomes, events=join_lines(lines), version=self._version())

    def Put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        lines = _check_put(request, context)
        if request.store in (b"", self._parts.store):
            self._parts.filling.put_many(split_ids(request.ids), lines)
        return pb.PutResponse(version=self._version())

    def Members(self, request: pb.MembersRequest, context: grpc.ServicerContext) -> pb.MembersResponse:
        parts = self._parts
        membership = parts.members.membership(parts.clock.monotonic())
        return pb.MembersResponse(
            version=membership.version,
            store=parts.store,
            caches=membership.caches,
            virtual_nodes=parts.virtual_nodes,
        )

    def Announce(self, request: pb.AnnounceRequest, context: grpc.ServicerContext) -> pb.MembersResponse:
        members = self._parts.members
        wrong = mistake(request.address)  # every client of home is told it, and dials it
        if wrong is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        if request.leaving:
            members.leave(request.address)
        elif not members.announce(request.address, self._parts.clock.monotonic()):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there are too many cache processes")
        return self.Members(pb.MembersRequest(), context)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=msgspec.json.encode(self._parts.status()))

    def _version(self) -> int:
        return self._parts.members.membership(self._parts.clock.monotonic()).version


class CacheService(eventstore_pb2_grpc.EventStoreServicer):
    """A cache process: what it has is FOUND, all else is BEHIND. What is absent, only home can tell."""

    def __init__(
        self,
        share: CacheShare,
        home: str,
        clock: Clock,
        latency: Histogram,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._share = share
        self._home = home
        self._clock = clock
        self._latency = latency
        self._status = status

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        self._check_addressed(request.store, context)
        _check_ids(request.ids, context)
        began = self._clock.monotonic()
        lines = self._share.get_many(request.store, split_ids(request.ids))
        self._latency.count((self._clock.monotonic() - began) * 1e6)
        missed = np.fromiter([line is None for line in lines], np.bool_, len(lines))
        outcomes = bytearray((missed * np.uint8(Found.BEHIND)).astype(np.uint8).tobytes())
        answer = bounded([line or b"" for line in lines], outcomes)
        return pb.LookupResponse(outcomes=bytes(outcomes), events=join_lines(answer))

    def Put(self, request: pb.PutRequest, context: grpc.ServicerContext) -> pb.PutResponse:
        self._check_addressed(request.store, context)
        lines = _check_put(request, context)
        self._share.put_many(request.store, split_ids(request.ids), lines)
        return pb.PutResponse()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=msgspec.json.encode(self._status()))

    def _check_addressed(self, store: bytes, context: grpc.ServicerContext) -> None:
        if not store:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this process holds a share of the cache only; ask the event store at {self._home}",
            )


def _check_ids(ids: bytes, context: grpc.ServicerContext) -> None:
    if len(ids) % ID_BYTES:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"ids has {len(ids)} bytes, no multiple of {ID_BYTES}: send packed ids",
        )


def _check_put(request: pb.PutRequest, context: grpc.ServicerContext) -> list[bytes]:
    _check_ids(request.ids, context)
    lines = split_lines(request.events) if request.events else []
    if len(lines) * ID_BYTES != len(request.ids) or not all(lines):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send a line, not empty, for each id")
    return lines
