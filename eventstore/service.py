"""The gRPC face of the EventStore: columns in, columns out, errors as status codes."""

from collections.abc import Callable
from typing import Any, Final

import grpc
import msgspec

from eventstore.lookup import EventLookup
from photon.core.columns import join_lines
from photon.core.errors import PhotonError
from photon.core.ids import ID_BYTES
from photon.wire import eventstore_pb2, eventstore_pb2_grpc

SERVICE_NAME: Final = eventstore_pb2.DESCRIPTOR.services_by_name["EventStore"].full_name


class EventStoreService(eventstore_pb2_grpc.EventStoreServicer):
    """Lookup and Status (photon/wire/eventstore.proto)."""

    def __init__(self, lookup: EventLookup, status: Callable[[], dict[str, Any]]) -> None:
        self._lookup = lookup
        self._status = status

    def Lookup(
        self, request: eventstore_pb2.LookupRequest, context: grpc.ServicerContext
    ) -> eventstore_pb2.LookupResponse:
        ids = request.ids
        if len(ids) % ID_BYTES:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"ids has {len(ids)} bytes, no multiple of {ID_BYTES}: send packed ids",
            )
        try:
            outcomes, lines = self._lookup.look_up(ids)
        except PhotonError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return eventstore_pb2.LookupResponse(outcomes=outcomes, events=join_lines(lines))

    def Status(
        self, request: eventstore_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> eventstore_pb2.StatusResponse:
        return eventstore_pb2.StatusResponse(json=msgspec.json.encode(self._status()))
