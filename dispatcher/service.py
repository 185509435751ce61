"""The dispatcher's gRPC service: only what it has to say of itself."""

from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from photon.core.errors import StorageError
from photon.core.ids import ID_BYTES
from photon.rpc import dispatcher_pb2, dispatcher_pb2_grpc


class DispatcherService(dispatcher_pb2_grpc.DispatcherServicer):
    """`status` gives the answer as a dict of plain values, `waiting` one for each of 16 x N ids."""

    def __init__(
        self, status: Callable[[], dict[str, Any]], waiting: Callable[[bytes], list[dict[str, Any] | None]]
    ) -> None:
        self._status = status
        self._waiting = waiting

    def Status(
        self, request: dispatcher_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.StatusResponse:
        del request, context
        return dispatcher_pb2.StatusResponse(json=msgspec.json.encode(self._status()))

    def Pending(
        self, request: dispatcher_pb2.PendingRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.PendingResponse:
        if len(request.ids) % ID_BYTES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"'ids' is {ID_BYTES} bytes an id")
        try:
            waiting = self._waiting(request.ids)
        except StorageError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return dispatcher_pb2.PendingResponse(json=msgspec.json.encode(waiting))
