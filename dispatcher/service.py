"""The dispatcher's gRPC service: only what it has to say of itself."""

from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from photon.wire import dispatcher_pb2, dispatcher_pb2_grpc


class DispatcherService(dispatcher_pb2_grpc.DispatcherServicer):
    """`status` gives the answer as a dict of plain values."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def Status(
        self, request: dispatcher_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.StatusResponse:
        del request, context
        return dispatcher_pb2.StatusResponse(json=msgspec.json.encode(self._status()))
