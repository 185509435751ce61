"""The only door to a dispatcher from another room."""

from typing import Any

from photon.wire import dispatcher_pb2, dispatcher_pb2_grpc
from photon.wire.rpc import ask_status, open_channel


class DispatcherClient:
    """Thread-safe; connects when first asked."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address)
        self._stub = dispatcher_pb2_grpc.DispatcherStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> dict[str, Any]:
        """The keys as in DispatcherServer.status. UnavailableError if it does not answer."""
        request = dispatcher_pb2.StatusRequest()
        return ask_status(self._stub.Status, request, self._timeout_s, f"dispatcher {self._address}")

    def close(self) -> None:
        self._channel.close()
