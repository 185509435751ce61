"""The only door to a dispatcher from another room."""

from typing import Any

import grpc
import msgspec

from photon.core.errors import UnavailableError
from photon.wire import dispatcher_pb2, dispatcher_pb2_grpc
from photon.wire.rpc import open_channel, to_photon_error


class DispatcherClient:
    """Thread-safe; connects when first asked."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address)
        self._stub = dispatcher_pb2_grpc.DispatcherStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> dict[str, Any]:
        """The keys as in DispatcherServer.status. UnavailableError if it does not answer."""
        try:
            response = self._stub.Status(dispatcher_pb2.StatusRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise to_photon_error(error, f"dispatcher {self._address}") from error
        try:
            status: dict[str, Any] = msgspec.json.decode(response.json)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"dispatcher {self._address}: its status is no JSON: {error}") from error
        return status

    def close(self) -> None:
        self._channel.close()
