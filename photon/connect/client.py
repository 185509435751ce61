"""The only door to an importer from another room."""

from typing import Any

from photon.rpc import importer_pb2, importer_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import ask_status


class ImporterClient:
    """Thread-safe; connects when first asked."""

    def __init__(self, address: str, timeout_s: float = 5.0, network: Network = LOOPBACK) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._channel = network.open(address)
        self._stub = importer_pb2_grpc.ImporterStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> dict[str, Any]:
        """The keys as in ImporterServer.status. UnavailableError if it does not answer."""
        request = importer_pb2.StatusRequest()
        return ask_status(self._stub.Status, request, self._timeout_s, f"importer {self._address}")

    def close(self) -> None:
        self._channel.close()
